"""Qwen3: LLaMA with a norm on each query and key head, and heads of a size of their own."""

from __future__ import annotations

from typing import Any

from lightning_megatron.config.hugging_face.decoder import decoder_from_hf, decoder_to_hf
from lightning_megatron.config.hugging_face.family import Family, Recipe
from lightning_megatron.config.hugging_face.windows import windows_from_hf, windows_to_hf
from lightning_megatron.config.reader import ConfigReader
from lightning_megatron.families.llama import QK_NORMS, llama_recipe
from lightning_megatron.families.llama import TENSORS as LLAMA_TENSORS

ARCHITECTURE = "Qwen3ForCausalLM"
SIZES = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "head_dim": 128}


def attention_from_hf(reader: ConfigReader) -> dict[str, Any]:
    """Fields of the configuration without windows and experts."""
    bias = reader.get("attention_bias", False)
    return decoder_from_hf(reader) | {"qk_norm": True, "add_qkv_bias": bias, "add_attention_out_bias": bias}


def attention_to_hf(reader: ConfigReader, architecture: str) -> dict[str, Any]:
    """Entries without windows and experts."""
    bias = reader["add_qkv_bias"]
    for name, only in (("qk_norm", True), ("add_bias_linear", False), ("add_attention_out_bias", bias)):
        reader.expect(name, None, (only,), f"not what {architecture} computes")
    return decoder_to_hf(reader, architecture) | {"attention_bias": bias}


def _from_hf(reader: ConfigReader) -> dict[str, Any]:
    found = attention_from_hf(reader)
    return found | windows_from_hf(reader, found["num_layers"])


def _to_hf(reader: ConfigReader) -> dict[str, Any]:
    return attention_to_hf(reader, ARCHITECTURE) | windows_to_hf(reader)


TENSORS = LLAMA_TENSORS.plus(*QK_NORMS)


def qwen3_recipe(
    layers: int, hidden: int, heads: int, groups: int, ffn: int, vocab: int, positions: int, **other: Any
) -> Recipe:
    """Recipe of a shape with Qwen3's blocks."""
    usual: dict[str, Any] = {"qk_norm": True, "head_dim": 128, "norm_epsilon": 1e-6, "rope_theta": 1e6}
    return llama_recipe(layers, hidden, heads, groups, ffn, vocab, positions, **usual | other)


# config.json of https://huggingface.co/Qwen.
PRESETS = {
    "qwen3-tiny": qwen3_recipe(8, 512, 8, 4, 1408, 32000, 2048, head_dim=96, tie_embeddings=True),
    "qwen3-0.6b": qwen3_recipe(28, 1024, 16, 8, 3072, 151936, 40960, tie_embeddings=True),
    "qwen3-8b": qwen3_recipe(36, 4096, 32, 8, 12288, 151936, 40960),
}

FAMILY = Family("qwen3", ARCHITECTURE, _from_hf, _to_hf, TENSORS, PRESETS, defaults=SIZES)
