"""Hugging Face models as ours and back: one file a family, pure functions on dictionaries of whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_megatron.checkpoint.formats.hf import gpt2, llama, mixtral
from lightning_megatron.checkpoint.formats.hf.qkv import HFShape
from lightning_megatron.checkpoint.formats.weight_map import Rule, WeightMap
from lightning_megatron.errors import ConfigError, Problem, nearest_names

__all__ = ["FAMILIES", "Family", "HFShape", "Rule", "WeightMap", "family_for", "family_of"]


@dataclass(frozen=True)
class Family:
    """The mapping of one Hugging Face architecture.

    Attributes:
        weight_map: rules between the tensors, for a shape.
        config_from_hf: ``config.json`` to fields of ``TransformerConfig``.
        config_to_hf: the inverse.
    """

    weight_map: Callable[[HFShape], WeightMap]
    config_from_hf: Callable[[Mapping[str, Any]], dict[str, Any]]
    config_to_hf: Callable[[Mapping[str, Any]], dict[str, Any]]


FAMILIES: Mapping[str, Family] = {
    module.MODEL_TYPE: Family(module.weight_map, module.config_from_hf, module.config_to_hf)
    for module in (llama, gpt2, mixtral)
}
"""By the ``model_type`` of ``config.json``."""


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

    Whether it computes just what the model does is for its ``config_to_hf`` to say.
    """
    if config["num_experts"]:
        return FAMILIES[mixtral.MODEL_TYPE]
    return FAMILIES[gpt2.MODEL_TYPE if config["position_embedding"] == "learned" else llama.MODEL_TYPE]
