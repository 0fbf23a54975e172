"""Hugging Face names and layouts against ours: nothing lost either way, and every fault named."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.checkpoint.formats.hf import family_of_weights
from lightning_megatron.checkpoint.formats.weight_map import fuse_qkv, split_qkv
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import ConfigError
from lightning_megatron.families import FAMILIES, family_for, family_of
from lightning_megatron.lightning.pretrained.parameter_specs import parameter_shapes
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.models.presets import preset
from lightning_megatron.params import ShardRanks, spec_registry
from tests.foreign import to_foreign, to_native, weight_map
from tests.whole_weights import load_full

transformers = pytest.importorskip("transformers")
load_file = pytest.importorskip("safetensors.torch").load_file

LLAMA = {
    "model_type": "llama",
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 37, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
GPT2 |= {"bos_token_id": None, "eos_token_id": None}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5}
QWEN2 = LLAMA | {"model_type": "qwen2"}
QWEN3 = LLAMA | {"model_type": "qwen3", "head_dim": 6}
QWEN3_MOE = LLAMA | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
QWEN3_MOE |= {"moe_intermediate_size": 20, "head_dim": 10}
GPT_OSS = LLAMA | {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
VARIANTS = [
    LLAMA,
    LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": 4},
    LLAMA | {"attention_bias": True, "mlp_bias": True, "head_dim": 6, "rms_norm_eps": 1e-5},
    LLAMA
    | {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    LLAMA | {"attention_bias": True},
    LLAMA | {"rope_scaling": {"type": "linear", "factor": 3.0}},
    LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 3.0}, "max_position_embeddings": 8},
    LLAMA | {"rope_scaling": YARN},
    LLAMA | {"rope_parameters": YARN | {"rope_theta": 500.0, "beta_fast": 3.0, "beta_slow": 0.5, "truncate": False}},
    LLAMA | {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0.4}},
    LLAMA | {"rope_scaling": YARN | {"attention_factor": 1.3}},
    QWEN2,
    QWEN2 | {"tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 4, "max_window_layers": 1},
    QWEN3,
    QWEN3 | {"attention_bias": True, "head_dim": 12, "rope_scaling": YARN},
    QWEN3_MOE,
    QWEN3_MOE | {"norm_topk_prob": False, "attention_bias": True},
    QWEN3_MOE | {"mlp_only_layers": [1]},
    QWEN3_MOE | {"decoder_sparse_step": 2, "router_aux_loss_coef": 0.3},
    GPT2,
    MIXTRAL,
    MIXTRAL | {"num_experts_per_tok": 3, "router_aux_loss_coef": 0.5, "router_jitter_noise": 0.1},
    GPT_OSS,  # with YaRN, which it has where nothing is said
    GPT_OSS | {"attention_bias": False, "rope_scaling": {"rope_type": "default"}, "swiglu_alpha": 1.2},
    GPT2 | {"tie_word_embeddings": False, "n_inner": 40, "activation_function": "relu"},
]


def build(config: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config)).eval()
    for param in model.parameters():  # biases and norms too, or a swap of two would not show
        torch.nn.init.normal_(param, std=0.3)
    return model


def state_of(model: Any, folder: Path) -> dict[str, Tensor]:
    """Tensors under the names of files, which are not always those in memory (experts)."""
    if not hasattr(model.config, "num_experts_per_tok"):
        return dict(model.state_dict())
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def ours(config: dict[str, Any]) -> TransformerConfig:
    return TransformerConfig(**FAMILIES[config["model_type"]].config_from_hf(config), vocab_multiple=1)


@pytest.mark.parametrize("config", VARIANTS)
def test_weights_survive_the_way_there_and_back_bit_for_bit(config: dict[str, Any], tmp_path: Path) -> None:
    state = state_of(build(config), tmp_path)
    mapping = weight_map(FAMILIES[config["model_type"]], ours(config))
    back = to_foreign(mapping, to_native(mapping, state, parameter_shapes(ours(config))))
    tied = {name for rule in mapping.rules for name in rule.repeats}  # files hold them once
    assert back.keys() == state.keys() - tied
    assert all(torch.equal(back[name], state[name]) for name in back)


@pytest.mark.parametrize("config", VARIANTS)
def test_our_model_has_exactly_these_tensors_and_computes_the_same_logits(
    config: dict[str, Any], tmp_path: Path
) -> None:
    reference = build(config)
    shape = ours(config)
    mapping = weight_map(FAMILIES[config["model_type"]], shape)
    tensors = to_native(mapping, state_of(reference, tmp_path), parameter_shapes(shape))
    model = GPTModel(shape).eval()
    assert {name: tuple(x.shape) for name, x in tensors.items()} == {
        name: spec.global_shape for name, spec in spec_registry(model).items()
    }
    load_full(model, tensors, ShardRanks())
    tokens = torch.randint(config["vocab_size"], (2, 11), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(tokens), reference(tokens).logits, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("config", VARIANTS)
def test_configurations_survive_the_way_there_and_back(config: dict[str, Any]) -> None:
    family = family_of(config)
    shape = ours(config)
    written = family.config_to_hf(shape)
    assert TransformerConfig(**family.config_from_hf(written), vocab_multiple=1) == shape
    # What transformers itself makes of the file we write is the same model again.
    read = transformers.AutoConfig.for_model(**written).to_dict()
    assert TransformerConfig(**family.config_from_hf(read), vocab_multiple=1) == shape


@pytest.mark.parametrize(
    "field",
    [
        {"moe_router_pre_softmax": True},
        {"moe_router_score": "sigmoid"},
        {"moe_layers": (1,)},
        {"moe_shared_expert_ffn_hidden_size": 8},
        {"moe_router_scaling_factor": 2.0},
    ],
)
def test_experts_that_mixtral_cannot_compute_are_not_exported_as_mixtral(field: dict[str, Any]) -> None:
    (name,) = field
    with pytest.raises(ConfigError, match=name):
        FAMILIES["mixtral"].config_to_hf(ours(MIXTRAL).replace(**field))


def test_old_and_new_spelling_of_rope_scaling_are_one() -> None:
    rule = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    new = LLAMA | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **rule}}
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **rule}}
    oldest = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **rule}}
    assert ours(new) == ours(old) == ours(oldest)
    assert asdict(ours(new))["rope_scaling"] == rule | {"kind": "llama3"}
    assert ours(new).rope_theta == 5e5
    assert ours(LLAMA).rope_scaling is None


RULE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
PLAIN = {"rope_type": "default", "rope_theta": 500.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, **RULE}


@pytest.mark.parametrize(
    "config",
    [
        LLAMA | {"rope_parameters": PLAIN, "rope_scaling": LLAMA3},
        LLAMA | {"rope_parameters": PLAIN, "rope_scaling": {"rope_type": "llama3", **RULE}},
        LLAMA | {"rope_parameters": PLAIN, "rope_scaling": {"rope_type": "llama3", **RULE}, "rope_theta": 300.0},
        LLAMA | {"rope_parameters": LLAMA3, "rope_scaling": {"rope_type": "default"}},
        LLAMA | {"rope_parameters": LLAMA3, "rope_scaling": {}},
        LLAMA | {"rope_parameters": LLAMA3, "rope_scaling": None},
        MIXTRAL | {"rope_parameters": LLAMA3, "rope_scaling": {"rope_type": "default"}},
    ],
)
def test_where_both_spellings_of_rope_scaling_are_there_transformers_choice_is_ours(config: dict[str, Any]) -> None:
    theirs = transformers.AutoConfig.for_model(**json.loads(json.dumps(config))).rope_parameters
    found = asdict(ours(config))
    assert found["rope_theta"] == theirs["rope_theta"]
    rule = {k: theirs.get(k) for k in RULE} | {"kind": "llama3"}
    assert found["rope_scaling"] == (rule if theirs["rope_type"] == "llama3" else None)


def test_rope_scaling_that_is_not_ours_is_refused_beside_rope_parameters_too() -> None:
    for given in (PLAIN, LLAMA3):
        with pytest.raises(ConfigError, match=r"rope_scaling\.rope_type='longrope'"):
            ours(LLAMA | {"rope_parameters": given, "rope_scaling": {"rope_type": "longrope", "factor": 4.0}})


@pytest.mark.parametrize(
    ("config", "field", "reason"),
    [
        (LLAMA, {"rms_norm_eps": "1e-05"}, "must be a number"),
        (LLAMA, {"rms_norm_eps": None}, "must be a number"),
        (LLAMA, {"tie_word_embeddings": "true"}, "must be true or false"),
        (LLAMA, {"max_position_embeddings": 64.5}, "must be a whole number"),
        (LLAMA, {"num_key_value_heads": True}, "must be a whole number"),
        (LLAMA, {"hidden_size": "32"}, "must be a whole number"),
        (LLAMA, {"hidden_act": None}, "must be a text"),
        (LLAMA, {"rope_parameters": "llama3"}, "must be a mapping"),
        (MIXTRAL, {"num_key_value_heads": None}, "must be a whole number"),
        (MIXTRAL, {"router_aux_loss_coef": "0.1"}, "must be a number"),
        (GPT2, {"layer_norm_epsilon": "1e-5"}, "must be a number"),
        (GPT2, {"n_positions": None}, "must be a whole number"),
    ],
)
def test_values_of_a_wrong_type_are_refused_as_transformers_does(
    config: dict[str, Any], field: dict[str, Any], reason: str
) -> None:
    (name,) = field
    with pytest.raises(ConfigError, match=f"{name}={field[name]!r}: {reason}"):
        ours(config | field)
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever it raises
        transformers.AutoConfig.for_model(**config | field)


@pytest.mark.parametrize(
    "config", [LLAMA | {"num_key_value_heads": None, "head_dim": None}, GPT2 | {"n_inner": None, "rope_scaling": None}]
)
def test_null_is_taken_where_transformers_takes_it(config: dict[str, Any]) -> None:
    transformers.AutoConfig.for_model(**config)
    without = {name: value for name, value in config.items() if value is not None}
    assert ours(config) == ours(without)


def test_quantized_weights_are_named_and_not_guessed_at() -> None:
    given = LLAMA | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}
    with pytest.raises(ConfigError, match=r"quant_method='bitsandbytes': weights are stored quantized"):
        family_of_weights(given)
    given = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []}}
    with pytest.raises(
        ConfigError, match=r"quant_method='mxfp4': .* quantization_config=Mxfp4Config\(dequantize=True\)"
    ):
        family_of_weights(given)


@pytest.mark.parametrize("config", [LLAMA, GPT2, MIXTRAL])
def test_a_width_that_does_not_split_over_the_heads_is_not_exported(config: dict[str, Any]) -> None:
    shape = ours(config).replace(hidden_size=34, head_dim=8)
    with pytest.raises(ConfigError, match=r"num_attention_heads=4: .* takes only divisors of hidden_size=34"):
        family_of(config).config_to_hf(shape)


def test_published_configurations_are_our_presets() -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 8192
    llama = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": rope,
        "rope_theta": 500000.0,
        "vocab_size": 128256,
    }
    assert TransformerConfig(**FAMILIES["llama"].config_from_hf(llama)) == preset("llama3.1-8b")
    oss = {
        "model_type": "gpt_oss",
        "attention_bias": True,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn", "truncate": False}
        | {"original_max_position_embeddings": 4096},
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.001,  # transformers' default; the file has 0.9, which would outweigh the loss
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    }
    assert TransformerConfig(**FAMILIES["gpt_oss"].config_from_hf(oss)) == preset("gpt-oss-20b")
    defaults = {name: oss[name] for name in ("model_type", "num_hidden_layers", "num_local_experts", "hidden_size")}
    defaults |= {name: oss[name] for name in ("num_attention_heads", "intermediate_size", "vocab_size")}
    assert TransformerConfig(**FAMILIES["gpt_oss"].config_from_hf(defaults)) == preset("gpt-oss-20b")
    gpt2 = {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}
    found = TransformerConfig(**FAMILIES["gpt2"].config_from_hf(gpt2))
    assert found.replace(hidden_dropout=0.0, attention_dropout=0.0) == preset("gpt2")


def test_the_files_of_the_bare_model_and_old_buffers_are_read() -> None:
    state = build(GPT2).state_dict()
    mapping = weight_map(FAMILIES["gpt2"], ours(GPT2))
    bare = {name.removeprefix("transformer."): x for name, x in state.items() if name != "lm_head.weight"}
    bare |= {f"h.{i}.attn.bias": torch.ones(1, 1, 16, 16) for i in range(2)}
    bare |= {"h.0.attn.masked_bias": torch.tensor(-1e4)}
    shapes = parameter_shapes(ours(GPT2))
    expected = to_native(mapping, state, shapes)
    found = to_native(mapping, bare, shapes)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    llama = build(LLAMA).state_dict() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    shapes = parameter_shapes(ours(LLAMA))
    assert "head.weight" in to_native(weight_map(FAMILIES["llama"], ours(LLAMA)), llama, shapes)


def test_names_that_do_not_fit_are_named() -> None:
    mapping, shapes = weight_map(FAMILIES["llama"], ours(LLAMA)), parameter_shapes(ours(LLAMA))
    state = dict(build(LLAMA).state_dict())
    state["model.layers.7.mlp.up_proj.weight"] = state.pop("model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ConfigError) as error:
        to_native(mapping, state, shapes)
    mistaken, right = "model.layers.7.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
    assert f"Hugging Face tensors='{mistaken}': unknown; nearest valid: {right}" in str(error.value)
    assert f"Hugging Face tensors='{right}': missing; nearest valid: {mistaken}" in str(error.value)
    with pytest.raises(ConfigError, match=r"layers\.2\.mlp\.x'?: unknown"):
        to_foreign(mapping, to_native(mapping, build(LLAMA).state_dict(), shapes) | {"layers.2.mlp.x": torch.ones(1)})
    without = {k: v for k, v in build(LLAMA).state_dict().items() if k != "lm_head.weight"}
    with pytest.raises(ConfigError, match=r"lm_head\.weight'?: missing"):
        to_native(mapping, without, shapes)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (LLAMA | {"mlp_bias": True}, "mlp_bias=True: feed-forward layers have biases only where attention has them"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act='gelu': no gated activation of this family; nearest valid: silu"),
        (LLAMA | {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_scaling.rope_type='longrope': unknown"),
        (LLAMA | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters.factor=None: missing"),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor=None: missing"),
        (
            LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0, "x": 1}},
            "rope_scaling.x=1: no known entry",
        ),
        (LLAMA | {"rope_scaling": YARN | {"attention_factor": 0.0}}, "attention_factor=0: makes cosines and sines 0"),
        (LLAMA | {"attention_sinks": 4}, "attention_sinks=4: no known entry of LlamaForCausalLM: remove it if"),
        (GPT_OSS | {"experts_per_token": 3}, "experts_per_token=3: is another name of num_experts_per_tok=2"),
        (GPT_OSS | {"num_experts": 5}, "num_experts=5: is another name of num_local_experts=4; nearest valid: 4"),
        (
            GPT_OSS | {"initial_context_length": 8},
            "initial_context_length=8: is another name of rope_scaling.original_max_position_embeddings=4096",
        ),
        (LLAMA | {"is_encoder_decoder": True}, "is_encoder_decoder=True: no known entry"),
        (LLAMA | {"rope_scaling": {"type": "llama3", "factor": 2.0}}, "rope_scaling.low_freq_factor=None: missing"),
        ({"model_type": "llama"}, "num_hidden_layers=None: missing in the Hugging Face configuration"),
        (GPT2 | {"activation_function": "silu"}, "activation_function='silu': unknown activation"),
        (GPT2 | {"embd_pdrop": 0.3}, "embd_pdrop=0.3: embeddings and sub-layers share one dropout"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True: attention is scaled"),
        (GPT2 | {"add_cross_attention": True}, "add_cross_attention=True: the model is a decoder alone"),
    ],
)
def test_what_we_cannot_reproduce_is_refused(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        family_of(config).config_from_hf(config)
    assert text in str(error.value)


def test_what_they_cannot_reproduce_is_refused() -> None:
    gpt, llama = ours(GPT2), ours(LLAMA)
    with pytest.raises(
        ConfigError, match="norm='layernorm': not what LlamaForCausalLM computes; nearest valid: rmsnorm"
    ):
        FAMILIES["llama"].config_to_hf(gpt)
    with pytest.raises(ConfigError, match="num_query_groups=2: not what GPT2LMHeadModel computes; nearest valid: 4"):
        FAMILIES["gpt2"].config_to_hf(llama)
    with pytest.raises(ConfigError, match="model_type='lama': no mapping for it; nearest valid: llama"):
        family_of({"model_type": "lama"})


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, "llama"),
        (LLAMA | {"attention_bias": True}, "llama"),
        (GPT2, "gpt2"),
        (MIXTRAL, "mixtral"),
        (QWEN2, "qwen2"),
        (QWEN3, "qwen3"),
        (QWEN3_MOE, "qwen3_moe"),
    ],
)
def test_a_model_is_written_as_the_first_family_that_computes_it(config: dict[str, Any], expected: str) -> None:
    assert family_for(ours(config))[0].model_type == expected


def test_the_family_of_the_source_is_asked_first_and_refusals_are_those_of_the_nearest() -> None:
    odd = ours(QWEN3).replace(norm="layernorm")
    with pytest.raises(ConfigError) as error:
        family_for(odd)
    assert str(error.value).endswith("norm='layernorm': not what Qwen3ForCausalLM computes; nearest valid: rmsnorm")
    mixture = ours(MIXTRAL)
    assert family_for(mixture, "mixtral")[0] is family_for(mixture, "no such")[0] is FAMILIES["mixtral"]
    both = ours(QWEN3_MOE | {"num_experts": 0})
    assert family_for(both, "qwen3_moe")[0].model_type == "qwen3", "a source that cannot is passed over"


def test_qkv_rows_lie_group_by_group() -> None:
    q, k, v = torch.arange(8.0), torch.arange(10.0, 14.0), torch.arange(20.0, 24.0)  # 4 heads, 2 groups, D = 2
    fused = fuse_qkv(q, k, v, groups=2)
    assert fused.tolist() == [0, 1, 2, 3, 10, 11, 20, 21, 4, 5, 6, 7, 12, 13, 22, 23]
    assert all(torch.equal(a, b) for a, b in zip(split_qkv(fused, 4, 2), (q, k, v), strict=True))
    with pytest.raises(ConfigError, match="num_query_groups=3: queries of 8 rows, keys of 4 and values of 4"):
        fuse_qkv(q, k, v, groups=3)
