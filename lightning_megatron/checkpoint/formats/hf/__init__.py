"""Hugging Face models as ours and back: one module for each family, with pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_megatron.checkpoint.formats.hf import gpt2, llama, mixtral
from lightning_megatron.checkpoint.formats.weight_map import WeightMap
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import ConfigError, Problem, nearest_names

__all__ = ["FAMILIES", "Family", "family_for", "family_of"]


@dataclass(frozen=True)
class Family:
    """The mapping of one Hugging Face architecture.

    Attributes:
        weight_map: rules between the tensors, for a configuration.
        config_from_hf: contents of ``config.json`` to fields of ``TransformerConfig``.
        config_to_hf: the inverse.
    """

    weight_map: Callable[[TransformerConfig], WeightMap]
    config_from_hf: Callable[[Mapping[str, Any]], dict[str, Any]]
    config_to_hf: Callable[[Mapping[str, Any]], dict[str, Any]]


FAMILIES: Mapping[str, Family] = {
    module.MODEL_TYPE: Family(module.weight_map, module.config_from_hf, module.config_to_hf)
    for module in (llama, gpt2, mixtral)
}
"""Families by the ``model_type`` of ``config.json``."""


def family_of(config: Mapping[str, Any]) -> Family:
    """The family that ``config.json`` belongs to.

    Raises:
        ConfigError: for one that has no mapping, and for weights that are stored quantized.
    """
    if (quantization := config.get("quantization_config")) is not None:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
        reason = "weights are stored quantized: let transformers dequantize the model and save it, then take that"
        raise ConfigError([Problem("quantization_config.quant_method", method, reason)])
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        raise ConfigError([Problem("model_type", kind, "no mapping for it", nearest_names(kind, list(FAMILIES)))])
    return FAMILIES[kind]


def family_for(config: Mapping[str, Any]) -> Family:
    """The family to write a model of ours as, given the fields of ``TransformerConfig``.

    Its ``config_to_hf`` refuses a model that it cannot compute.
    """
    if config["num_experts"]:
        return FAMILIES[mixtral.MODEL_TYPE]
    return FAMILIES[gpt2.MODEL_TYPE if config["position_embedding"] == "learned" else llama.MODEL_TYPE]
