"""BLOOM's directories: every entry of ``config.json`` taken or refused, names with and without the prefix."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import ConfigError
from lightning_megatron.families import FAMILIES, family_for
from lightning_megatron.lightning.pretrained.parameter_specs import parameter_shapes
from lightning_megatron.models.presets import preset
from tests.foreign import to_foreign, to_native, weight_map

transformers = pytest.importorskip("transformers")

BLOOM = FAMILIES["bloom"]
SMALL: dict[str, Any] = {"model_type": "bloom", "vocab_size": 37, "hidden_size": 24, "n_layer": 2, "n_head": 6}
# Entries of the published files. What only the code that trained BLOOM has read is among them.
PUBLISHED: dict[str, Any] = {
    "apply_residual_connection_post_layernorm": False,
    "architectures": ["BloomForCausalLM"],
    "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "bias_dropout_fusion": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_dropout": 0.0,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "masked_softmax_fusion": True,
    "model_type": "bloom",
    "n_inner": None,
    "offset_alibi": 100,
    "pad_token_id": 3,
    "seq_length": 2048,
    "skip_bias_add": True,
    "skip_bias_add_qkv": False,
    "unk_token_id": 0,
    "use_cache": True,
    "vocab_size": 250880,
}
SIZES = {
    "bloom-560m": {"n_embed": 1024, "n_layer": 24, "num_attention_heads": 16, "pretraining_tp": 1},
    "bloom-7b1": {"n_embed": 4096, "n_layer": 30, "num_attention_heads": 32, "pretraining_tp": 4},
    "bloom-176b": {"n_embed": 14336, "n_layer": 70, "num_attention_heads": 112, "pretraining_tp": 4},
}


def ours(contents: dict[str, Any]) -> TransformerConfig:
    return TransformerConfig(**BLOOM.config_from_hf(contents), vocab_multiple=1)


@pytest.mark.parametrize("name", SIZES)
def test_published_configurations_are_our_presets(name: str) -> None:
    assert BLOOM.config_of(PUBLISHED | SIZES[name]) == preset(name)


def test_sizes_have_two_names_of_which_one_is_enough_and_both_must_agree() -> None:
    other = {"model_type": "bloom", "vocab_size": 37, "n_embed": 24, "num_hidden_layers": 2, "num_attention_heads": 6}
    assert ours(other) == ours(SMALL) == ours(SMALL | other)
    for name, theirs in (("n_embed", 48), ("num_hidden_layers", 3), ("num_attention_heads", 4)):
        with pytest.raises(ConfigError, match=f"{name}={theirs}: contradicts "):
            ours(SMALL | {name: theirs})


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"apply_residual_connection_post_layernorm": True}, "the residual is taken before the norm"),
        ({"hidden_dropout": 0.1}, "BloomForCausalLM has no dropout of embeddings"),
        ({"n_inner": 48}, "always has 4 hidden_size"),
        ({"layer_norm_epsilon": "1e-5"}, "must be a number"),
        ({"pretraining_tp": "4"}, "must be a whole number"),
        ({"slow_but_exact": 1}, "must be true or false"),
        ({"alibi": False}, "no known entry of BloomForCausalLM"),
        ({"n_layer": None}, "missing in the Hugging Face configuration"),
    ],
)
def test_what_we_cannot_reproduce_is_refused_by_name(entry: dict[str, Any], reason: str) -> None:
    (name,) = entry
    with pytest.raises(ConfigError) as error:
        ours(SMALL | entry)
    assert f"{name}={entry[name]!r}" in str(error.value)
    assert reason in str(error.value)


@pytest.mark.parametrize(
    "field",
    [
        {"embedding_norm": False},
        {"position_embedding": "none"},
        {"activation": "gelu"},
        {"norm": "rmsnorm"},
        {"add_bias_linear": False},
        {"ffn_hidden_size": 48},
        {"num_query_groups": 2},
        {"head_dim": 8},
    ],
)
def test_what_bloom_cannot_compute_is_not_exported_as_bloom(field: dict[str, Any]) -> None:
    (name,) = field
    with pytest.raises(ConfigError, match=name):
        BLOOM.config_to_hf(ours(SMALL).replace(**field))


@pytest.mark.parametrize("tied", [True, False])
def test_configurations_and_weights_survive_the_way_there_and_back(tied: bool) -> None:
    torch.manual_seed(0)
    model = transformers.BloomForCausalLM(transformers.BloomConfig(**SMALL, tie_word_embeddings=tied))
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.3)
    config = ours(SMALL | {"tie_word_embeddings": tied})
    family, written = family_for(config)
    assert family is BLOOM
    assert ours(written) == config
    read = transformers.AutoConfig.for_model(**written).to_dict()
    assert ours(read) == config
    mapping, state = weight_map(BLOOM, config), dict(model.state_dict())
    native = to_native(mapping, state, parameter_shapes(config))
    back = to_foreign(mapping, native)
    assert back.keys() == state.keys() - ({"lm_head.weight"} if tied else set())
    assert all(torch.equal(back[name], state[name]) for name in back)
    bare = {name.removeprefix("transformer."): x for name, x in state.items() if name != "lm_head.weight" or not tied}
    again = to_native(mapping, bare, parameter_shapes(config))
    assert all(torch.equal(again[name], native[name]) for name in native)


def test_queries_keys_and_values_lie_head_by_head_as_ours_do() -> None:
    config = ours(SMALL)
    names = {rule.native: rule.foreign for rule in weight_map(BLOOM, config).rules}
    assert names["layers.1.attention.qkv.bias"] == ("transformer.h.1.self_attention.query_key_value.bias",)
    assert names["embedding.norm.weight"] == ("transformer.word_embeddings_layernorm.weight",)
