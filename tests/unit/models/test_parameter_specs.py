"""Names, shapes and specs that follow from a configuration, held against those of the model in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_megatron.checkpoint.formats.megatron.weight_map import megatron_weight_map as megatron_weight_map
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.encoders.bert.config import BertConfig
from lightning_megatron.encoders.bert.model import BertModel
from lightning_megatron.encoders.t5.config import T5Config
from lightning_megatron.encoders.t5.model import T5Model
from lightning_megatron.errors import ConfigError
from lightning_megatron.families import family_for
from lightning_megatron.lightning.pretrained.parameter_specs import parameter_shapes, parameter_specs, weight_shapes
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.models.presets import PRESETS
from lightning_megatron.models.stages import StagedModel
from lightning_megatron.params import named_specs, named_weights
from tests.foreign import weight_map

SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "num_query_groups": 2}
SMALL |= {"ffn_hidden_size": 40, "vocab_size": 37, "max_position_embeddings": 16, "head_dim": 6}
EXPERTS: dict[str, Any] = {"num_experts": 3, "add_bias_linear": False}
LATENTS: dict[str, Any] = {"position_embedding": "rope", "kv_lora_rank": 8, "rope_head_dim": 2, "num_query_groups": 4}
OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "untied": {"tie_embeddings": False},
    "without biases": {"add_bias_linear": False},
    "RMS norm": {"norm": "rmsnorm"},
    "gated": {"activation": "swiglu"},
    "rotary": {"position_embedding": "rope"},
    "a norm behind tokens": {"embedding_norm": True},
    "ALiBi": {"position_embedding": "alibi"},
    "no positions": {"position_embedding": "none"},
    "wide heads": {"head_dim": 10},
    "every head a group": {"num_query_groups": 4},
    "biases on queries, keys and values": {"add_bias_linear": False, "add_qkv_bias": True},
    "biases in attention": {"add_bias_linear": False, "add_qkv_bias": True, "add_attention_out_bias": True},
    "normed heads": {"qk_norm": True},
    "heads normed by RMS": {"qk_norm": True, "norm": "rmsnorm"},
    "padded vocabulary": {"vocab_multiple": 128},
    "norms behind sub-layers": {"post_norms": True, "norm_zero_centered": True},
    "sinks": {"attention_sinks": True, "sliding_window": 5},
    "gated by GELU": {"activation": "geglu_tanh", "norm": "rmsnorm", "post_norms": True},
    "experts": EXPERTS,
    "gated experts": EXPERTS | {"activation": "swiglu"},
    "experts in some layers": EXPERTS | {"moe_layers": (1,)},
    "narrow experts": EXPERTS | {"moe_ffn_hidden_size": 8},
    "a shared expert": EXPERTS | {"moe_shared_expert_ffn_hidden_size": 12},
    "a gated shared expert": EXPERTS | {"moe_shared_expert_ffn_hidden_size": 12, "activation": "swiglu"},
    "biased choice of experts": EXPERTS | {"moe_router_score": "sigmoid", "moe_expert_bias_update_rate": 0.1},
    "a bias that stays": EXPERTS | {"moe_router_score": "sigmoid", "moe_expert_bias": True},
    "experts with biases": EXPERTS | {"moe_linear_bias": True},
    "clamped experts with biases": EXPERTS | {"moe_linear_bias": True, "activation": "swiglu_clamped"},
    "bins of capacities": EXPERTS | {"moe_capacity_bins": 3},
    "latents": LATENTS,
    "latents of queries too": LATENTS | {"q_lora_rank": 10, "v_head_dim": 5, "norm": "rmsnorm"},
    "latents with biases": LATENTS | {"q_lora_rank": 10, "add_bias_linear": False, "add_qkv_bias": True},
    "a module for a further token": {"position_embedding": "rope", "mtp_num_layers": 2},
    "experts in it": EXPERTS | {"position_embedding": "rope", "mtp_num_layers": 1, "moe_layers": (1,)},
}


def small(config: TransformerConfig) -> TransformerConfig:
    """The same model with few and small layers."""
    grouped = config.num_query_groups < config.num_attention_heads
    sizes = SMALL | {"num_query_groups": 2 if grouped else 4, "rope_head_dim": 2 if config.rope_head_dim else 0}
    if config.has_latents:
        sizes |= {
            "kv_lora_rank": 8,
            "q_lora_rank": 10 if config.q_lora_rank else 0,
            "v_head_dim": 5,
        }
    if config.moe_ffn_hidden_size:
        sizes["moe_ffn_hidden_size"] = 8
    for name in ("moe_layers", "sliding_window_layers"):
        sizes[name] = tuple(number for number in getattr(config, name) if number < 2)
    if config.embedding_scale != 1.0:
        sizes["embedding_scale"] = SMALL["hidden_size"] ** 0.5
    return replace(config, **sizes)


CONFIGS = {name: TransformerConfig(**SMALL | options) for name, options in OPTIONS.items()}
CONFIGS |= {name: small(config) for name, config in PRESETS.items() if type(config) is TransformerConfig}
BERT: dict[str, BertConfig] = {
    "BERT": BertConfig(**SMALL | {"num_query_groups": 4}),
    "BERT, norms before, untied": BertConfig(**SMALL, norm_position="before", tie_embeddings=False),
    "BERT of one segment and one head": BertConfig(**SMALL, num_token_types=0, next_sentence=False, norm="rmsnorm"),
}


_SIZES = {name: SMALL[name] for name in ("hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings")}
T5: dict[str, T5Config] = {
    "T5": T5Config(4, **_SIZES),
    "T5, gated, untied, of uneven stacks": T5Config(
        4, **_SIZES, num_decoder_layers=1, activation="geglu_tanh", tie_embeddings=False, head_dim=6
    ),
}


@pytest.mark.parametrize("name", [*CONFIGS, *BERT, *T5])
def test_the_model_has_exactly_these_parameters(name: str) -> None:
    config = (CONFIGS | BERT | T5)[name]
    models: dict[type, Callable[..., StagedModel]] = {BertConfig: BertModel, T5Config: T5Model}
    model = models.get(type(config), GPTModel)(config)
    built = {name: spec for name, _, spec in named_specs(model)}
    assert parameter_specs(config) == built
    assert parameter_shapes(config) == {name: spec.global_shape for name, spec in built.items()}
    assert sum(torch.Size(shape).numel() for shape in parameter_shapes(config).values()) == config.num_parameters()
    buffers = {name: spec.global_shape for name, _, spec in named_weights(model) if name not in built}
    assert weight_shapes(config) == parameter_shapes(config) | buffers
    assert all(name.endswith("router.expert_bias") for name in buffers)
    assert bool(buffers) == bool(config.num_experts and config.has_expert_bias)
    # Dtypes follow from no configuration: a model has torch's default, and imported tensors that of their files.
    assert {param.dtype for param in model.parameters()} == {torch.get_default_dtype()}


def test_no_value_is_made_and_no_random_number_drawn() -> None:
    before = torch.get_rng_state()
    shapes = weight_shapes(PRESETS["llama3.1-405b"].replace(vocab_multiple=1))  # more than a machine holds
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) > 400e9
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_weight_maps_have_a_rule_for_each_parameter(name: str) -> None:
    config = CONFIGS[name]
    names = parameter_shapes(config).keys()
    beyond = config.moe_shared_expert_ffn_hidden_size or config.post_norms or config.attention_sinks
    beyond = beyond or config.has_latents or config.mtp_num_layers
    if not (beyond or config.embedding_norm or config.moe_linear_bias):
        assert megatron_weight_map(config, names).native_names == names
    try:
        family, _ = family_for(config)
    except ConfigError:  # no family can compute it, and none has rules for it
        return
    assert weight_map(family, config).native_names == weight_shapes(config).keys()
