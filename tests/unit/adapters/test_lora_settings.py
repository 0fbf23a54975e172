"""Adapters that cannot be: every text that a user meets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron import BertModule, ConfigError, GPTModule, LoRA, TransformerConfig
from lightning_megatron.adapters.targets import AdaptedLayer, adapted_layers
from lightning_megatron.checkpoint import CheckpointError
from lightning_megatron.families import FAMILIES
from lightning_megatron.lightning.pretrained.parameter_specs import weight_shapes
from lightning_megatron.lightning.pretrained.peft import read_peft_settings
from tests.families import TINY
from tests.tiny import tiny_llama


def config_of(family: str) -> TransformerConfig:
    return FAMILIES[family].config_of(TINY[family])


def refusal(lora: Any, family: str = "llama") -> str:
    with pytest.raises(ConfigError) as error:
        GPTModule(config_of(family), lora=lora)
    return str(error.value)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"rank": 0}, "rank=0: must be a whole number of at least 1; nearest valid: 1"),
        ({"rank": 2.5}, "rank=2.5"),
        ({"alpha": 0.0}, "alpha=0.0: must be a finite number above 0.0"),
        ({"dropout": 1.0}, "dropout=1.0: must be a finite number of at least 0.0 and less than 1.0"),
        ({"targets": ()}, "targets=(): names no layer to adapt; nearest valid: all-linear"),
        ({"dora": True, "dropout": 0.1}, "DoRA with dropout would need a second product with the frozen weight"),
    ],
)
def test_settings_out_of_range(fields, text):
    with pytest.raises(ConfigError) as error:
        LoRA(**fields)
    assert text in str(error.value)


def test_all_faults_at_once():
    with pytest.raises(ConfigError, match="2 problems"):
        LoRA(rank=-1, dropout=2.0)


@pytest.mark.parametrize(
    ("family", "targets", "text"),
    [
        ("llama", ["q_prj"], "targets='q_prj': LlamaForCausalLM has no linear layer of this name, but embed_tokens,"),
        ("llama", ["q_prj"], "; nearest valid: q_proj"),
        ("llama", ["c_attn"], "LlamaForCausalLM has no linear layer of this name"),
        (
            "gpt2",
            ["q_proj"],
            "GPT2LMHeadModel has no linear layer of this name, but wte, c_attn, c_proj, c_fc",
        ),
        ("mixtral", ["gate_proj"], "but embed_tokens, q_proj, k_proj, v_proj, o_proj, lm_head, w1, w3, w2"),
        ("mixtral", ["gate"], "targets='gate'"),
        ("llama", ["input_layernorm"], "targets='input_layernorm'"),
        ("gpt_oss", ["gate_up_proj"], "targets='gate_up_proj'"),
    ],
)
def test_a_target_that_the_family_does_not_have(family, targets, text):
    assert text in refusal(LoRA(targets=targets), family)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"dora": True}, "dora=True: experts do not support DoRA, as in PEFT: leave their layers out of targets"),
        ({"dropout": 0.1}, "dropout=0.1: adapters of experts do not support dropout, as in PEFT"),
    ],
)
def test_experts_have_plain_adapters(fields, text):
    assert text in refusal(LoRA(**fields), "mixtral")
    GPTModule(config_of("mixtral"), lora=LoRA(targets=["q_proj", "v_proj"], **fields))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"my.adapter": LoRA()}, "lora='my.adapter': is no name of letters, digits, - and _"),
        ({"rnk": 4}, "is neither an adapter nor a field of LoRA; nearest valid: rank"),
        (7, "lora=7"),
    ],
)
def test_an_argument_that_is_no_adapter(given, text):
    assert text in refusal(given)


def test_modules_without_a_decoder_have_none():
    with pytest.raises(ConfigError, match="BertModule has no adapters: they are for decoders"):
        BertModule("bert-base", num_layers=1, lora=LoRA())


def test_an_adapter_that_does_not_exist_cannot_be_used():
    module = GPTModule(tiny_llama(), lora={"first": LoRA(), "second": {"rank": 2}})
    with pytest.raises(ConfigError, match="name='frist': the module has no such adapter; nearest valid: first"):
        module.use_adapter("frist")
    assert module.lora["second"] == LoRA(rank=2)


def layers_of(family: str, lora: LoRA) -> tuple[AdaptedLayer, ...]:
    config = config_of(family)
    return adapted_layers(FAMILIES[family], config, lora, weight_shapes(config))


def test_targets_are_ends_of_names_as_in_peft():
    plan = layers_of("gpt2", LoRA(targets=["attn.c_proj"]))
    assert [layer.name for layer in plan] == [f"layers.{n}.attention.out" for n in range(4)]
    plan = layers_of("llama", LoRA(targets="model.layers.1.self_attn.k_proj"))
    assert [(layer.name, [part.is_target for part in layer.parts]) for layer in plan] == [
        ("layers.1.attention.qkv", [False, True, False])
    ]


@pytest.mark.parametrize("family", [name for name in TINY if name not in ("gpt_oss",)])
def test_all_linear_is_every_linear_layer_but_the_output(family):
    plan = layers_of(family, LoRA())
    assert all(part.is_target for layer in plan for part in layer.parts)
    assert not {"head", "embedding.word"} & {layer.name for layer in plan}
    assert not [layer.name for layer in plan if "router" in layer.name]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head']"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern={'q_proj': 2}"),
        ({"target_parameters": ["gate_up_proj"]}, "target_parameters=['gate_up_proj']"),
        ({"target_modules": ".*_proj"}, "a pattern; write the names of modules that it stands for as a list"),
        ({"r": 0}, "rank=0"),
    ],
)
def test_settings_of_peft_that_adapters_here_do_not_have(tmp_path, settings, text):
    usual = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(usual | settings))
    with pytest.raises(ConfigError) as error:
        read_peft_settings(tmp_path)
    assert text in str(error.value)


def test_a_directory_that_is_not_pefts(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"is no directory of PEFT's: it has no adapter_config.json"):
        read_peft_settings(tmp_path)
