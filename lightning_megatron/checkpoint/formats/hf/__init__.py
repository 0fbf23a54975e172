"""Hugging Face directories, read and written by the rules of ``lightning_megatron/families``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_megatron.config.hugging_face.family import Family
from lightning_megatron.errors import ConfigError, Problem
from lightning_megatron.families import family_of

__all__ = ["family_of_weights"]

_WAYS_OUT = {
    "mxfp4": "load the model by transformers with quantization_config=Mxfp4Config(dequantize=True) and"
    " dtype=torch.bfloat16, save it with save_pretrained, and use that directory"
}
"""Advice for quantization methods that transformers dequantizes with a special option."""


def family_of_weights(config: Mapping[str, Any]) -> Family:
    """The family that ``config.json`` belongs to, for a directory whose weights are to be read.

    Raises:
        ConfigError: if the family is unknown, or the weights are stored quantized.
    """
    if (quantization := config.get("quantization_config")) is not None:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
        way_out = _WAYS_OUT.get(str(method), "dequantize and save the model with transformers, and use that directory")
        reason = f"weights are stored quantized: {way_out}"
        raise ConfigError([Problem("quantization_config.quant_method", method, reason)])
    return family_of(config)
