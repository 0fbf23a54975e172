"""Qwen2 and Qwen2.5: LLaMA with biases on queries, keys and values."""

from __future__ import annotations

from typing import Any

from lightning_megatron.config.hugging_face.decoder import decoder_from_hf, decoder_to_hf
from lightning_megatron.config.hugging_face.family import Family, Recipe
from lightning_megatron.config.hugging_face.windows import windows_from_hf, windows_to_hf
from lightning_megatron.config.reader import ConfigReader
from lightning_megatron.families.llama import TENSORS, llama_recipe

ARCHITECTURE = "Qwen2ForCausalLM"
_SIZES = {"num_key_value_heads": 32, "max_position_embeddings": 32768}


def _from_hf(reader: ConfigReader) -> dict[str, Any]:
    found = decoder_from_hf(reader) | {"add_qkv_bias": True}
    return found | windows_from_hf(reader, found["num_layers"])


def _to_hf(reader: ConfigReader) -> dict[str, Any]:
    for name, only in (("add_qkv_bias", True), ("add_bias_linear", False)):
        reader.expect(name, None, (only,), f"not what {ARCHITECTURE} computes")
    return decoder_to_hf(reader, ARCHITECTURE) | windows_to_hf(reader)


def _qwen2(
    layers: int, hidden: int, heads: int, groups: int, ffn: int, vocab: int, positions: int, **other: Any
) -> Recipe:
    usual: dict[str, Any] = {"add_qkv_bias": True, "norm_epsilon": 1e-6, "rope_theta": 1e6}
    return llama_recipe(layers, hidden, heads, groups, ffn, vocab, positions, **usual | other)


# config.json of the base models, https://huggingface.co/Qwen.
PRESETS = {
    "qwen2.5-tiny": _qwen2(8, 512, 8, 2, 1408, 32000, 2048, tie_embeddings=True),
    "qwen2.5-0.5b": _qwen2(24, 896, 14, 2, 4864, 151936, 32768, tie_embeddings=True),
    "qwen2.5-7b": _qwen2(28, 3584, 28, 4, 18944, 152064, 131072),
}

FAMILY = Family("qwen2", ARCHITECTURE, _from_hf, _to_hf, TENSORS, PRESETS, defaults=_SIZES)
