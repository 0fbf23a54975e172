"""Mistral: LLaMA's blocks with a sliding window."""

from __future__ import annotations

from typing import Any

from lightning_megatron.config.hugging_face.decoder import decoder_from_hf, decoder_to_hf
from lightning_megatron.config.hugging_face.family import Family, Recipe
from lightning_megatron.config.hugging_face.windows import one_window, window_from_hf
from lightning_megatron.config.reader import ConfigReader
from lightning_megatron.families.llama import TENSORS, llama_recipe

ARCHITECTURE = "MistralForCausalLM"


def _from_hf(reader: ConfigReader) -> dict[str, Any]:
    return decoder_from_hf(reader) | {"sliding_window": window_from_hf(reader)}


def _to_hf(reader: ConfigReader) -> dict[str, Any]:
    reader.expect("add_bias_linear", None, (False,), f"not what {ARCHITECTURE} computes")
    return decoder_to_hf(reader, ARCHITECTURE) | {"sliding_window": one_window(reader, ARCHITECTURE)}


def _mistral(vocab: int, **other: Any) -> Recipe:
    return llama_recipe(32, 4096, 32, 8, 14336, vocab, 32768, **other)


# config.json of https://huggingface.co/mistralai/Mistral-7B-v0.1 and -v0.3.
PRESETS = {
    "mistral-tiny": llama_recipe(4, 256, 8, 4, 512, 32000, 2048, sliding_window=128),
    "mistral-7b": _mistral(32000, sliding_window=4096),
    "mistral-7b-v0.3": _mistral(32768, rope_theta=1e6),
}

FAMILY = Family(
    "mistral",
    ARCHITECTURE,
    _from_hf,
    _to_hf,
    TENSORS,
    PRESETS,
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
)
