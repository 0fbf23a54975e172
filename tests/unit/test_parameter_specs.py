"""Names, shapes and specs that follow from a configuration, held against those of the model that it builds."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from lightning_megatron.checkpoint.formats import hf, megatron
from lightning_megatron.config.parameter_specs import parameter_shapes, parameter_specs
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.models.presets import PRESETS
from lightning_megatron.params import named_specs

SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "num_query_groups": 2}
SMALL |= {"ffn_hidden_size": 40, "vocab_size": 37, "max_position_embeddings": 16, "head_dim": 6}
EXPERTS: dict[str, Any] = {"num_experts": 3, "add_bias_linear": False}
OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "untied": {"tie_embeddings": False},
    "without biases": {"add_bias_linear": False},
    "RMS norm": {"norm": "rmsnorm"},
    "gated": {"activation": "swiglu"},
    "rotary": {"position_embedding": "rope"},
    "no positions": {"position_embedding": "none"},
    "wide heads": {"head_dim": 10},
    "every head a group": {"num_query_groups": 4},
    "padded vocabulary": {"vocab_multiple": 128},
    "experts": EXPERTS,
    "gated experts": EXPERTS | {"activation": "swiglu"},
    "experts in some layers": EXPERTS | {"moe_layers": (1,)},
    "narrow experts": EXPERTS | {"moe_ffn_hidden_size": 8},
    "a shared expert": EXPERTS | {"moe_shared_expert_ffn_hidden_size": 12},
    "a gated shared expert": EXPERTS | {"moe_shared_expert_ffn_hidden_size": 12, "activation": "swiglu"},
    "biased choice of experts": EXPERTS | {"moe_router_score": "sigmoid", "moe_expert_bias_update_rate": 0.1},
    "bins of capacities": EXPERTS | {"moe_capacity_bins": 3},
}


def small(config: TransformerConfig) -> TransformerConfig:
    """The same model with few and small layers."""
    grouped = config.num_query_groups < config.num_attention_heads
    sizes = SMALL | {"num_query_groups": 2 if grouped else 4}
    if config.moe_ffn_hidden_size:
        sizes["moe_ffn_hidden_size"] = 8
    return replace(config, **sizes, moe_layers=tuple(number for number in config.moe_layers if number < 2))


CONFIGS = {name: TransformerConfig(**SMALL | options) for name, options in OPTIONS.items()}
CONFIGS |= {name: small(config) for name, config in PRESETS.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_model_has_exactly_these_parameters(name: str) -> None:
    config = CONFIGS[name]
    model = GPTModel(config)
    built = {name: spec for name, _, spec in named_specs(model)}
    assert parameter_specs(config) == built
    assert parameter_shapes(config) == {name: spec.global_shape for name, spec in built.items()}
    assert sum(torch.Size(shape).numel() for shape in parameter_shapes(config).values()) == config.num_parameters()
    # Dtypes follow from no configuration: a model has torch's default, and imported tensors that of their files.
    assert {param.dtype for param in model.parameters()} == {torch.get_default_dtype()}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_weight_maps_have_a_rule_for_each_parameter(name: str) -> None:
    config = CONFIGS[name]
    family = hf.family_for(asdict(config))
    names = parameter_shapes(config).keys()
    if not config.moe_shared_expert_ffn_hidden_size:
        assert megatron.weight_map(config).native_names == names
    try:
        family.config_to_hf(asdict(config))
    except ValueError:  # the family cannot compute it, and has no rules for it
        return
    assert family.weight_map(config).native_names == names
