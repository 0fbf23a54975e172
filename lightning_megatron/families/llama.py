"""LLaMA 2 and 3.x."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning_megatron.config.hugging_face.decoder import decoder_from_hf, decoder_to_hf
from lightning_megatron.config.hugging_face.family import Family, Recipe
from lightning_megatron.config.hugging_face.tensors import QKV, STACKED, Tensors, in_layers, rule
from lightning_megatron.config.reader import ConfigReader
from lightning_megatron.config.rope_scaling import Llama3Scaling
from lightning_megatron.config.transformer import TransformerConfig

ARCHITECTURE = "LlamaForCausalLM"


def _from_hf(reader: ConfigReader) -> dict[str, Any]:
    bias, everywhere = reader.get("attention_bias", False), reader.get("mlp_bias", False)
    if everywhere and not bias:
        reader.refuse("mlp_bias", True, "feed-forward layers have biases only where attention has them, too", (False,))
    only = bias and not everywhere
    biases = {"add_bias_linear": everywhere, "add_qkv_bias": only, "add_attention_out_bias": only}
    return decoder_from_hf(reader) | biases


def _to_hf(reader: ConfigReader) -> dict[str, Any]:
    everywhere = reader["add_bias_linear"]
    only, out = reader["add_qkv_bias"], reader["add_attention_out_bias"]
    if not everywhere and out != only:
        reader.refuse("add_attention_out_bias", out, f"not what {ARCHITECTURE} computes", (only,))
    return decoder_to_hf(reader, ARCHITECTURE) | {"attention_bias": everywhere or only, "mlp_bias": everywhere}


TENSORS = Tensors(
    (
        rule("embedding.word.weight", "model.embed_tokens.weight", tied="lm_head.weight"),
        *in_layers(
            "layers.{n}.",
            "model.layers.{n}.",
            rule("attention_norm.weight", "input_layernorm.weight"),
            rule("attention.qkv.{kind}", *(f"self_attn.{part}_proj.{{kind}}" for part in "qkv"), kind=QKV),
            rule("attention.out.{kind}", "self_attn.o_proj.{kind}"),
            rule("mlp.fc1.{kind}", "mlp.gate_proj.{kind}", "mlp.up_proj.{kind}", kind=STACKED),
            rule("mlp.fc2.{kind}", "mlp.down_proj.{kind}"),
            rule("mlp_norm.weight", "post_attention_layernorm.weight"),
        ),
        rule("head.norm.weight", "model.norm.weight"),
        rule("head.weight", "lm_head.weight"),
    )
)
QK_NORMS = in_layers(
    "layers.{n}.attention.",
    "model.layers.{n}.self_attn.",
    rule("q_norm.weight", "q_norm.weight"),
    rule("k_norm.weight", "k_norm.weight"),
)
"""Norms of queries and keys, in families that have them."""


def llama_recipe(
    layers: int, hidden: int, heads: int, groups: int, ffn: int, vocab: int, positions: int, **other: Any
) -> Recipe:
    """Recipe of a shape with LLaMA's blocks."""
    family: dict[str, Any] = {
        "norm": "rmsnorm",
        "activation": "swiglu",
        "position_embedding": "rope",
        "add_bias_linear": False,
        "tie_embeddings": False,
    }
    sizes = {"ffn_hidden_size": ffn, "num_query_groups": groups}
    return partial(TransformerConfig, layers, hidden, heads, vocab, positions, **sizes | family | other)


def _llama3(layers: int, hidden: int, heads: int, groups: int, ffn: int, factor: float, **other: Any) -> Recipe:
    rope = {"rope_theta": 500000.0, "rope_scaling": Llama3Scaling(factor=factor)}
    return llama_recipe(layers, hidden, heads, groups, ffn, 128256, 131072, **rope | other)


# The published model cards' configurations.
PRESETS = {
    "llama-tiny": llama_recipe(8, 512, 8, 4, 1408, 32000, 2048),
    "llama2-7b": llama_recipe(32, 4096, 32, 32, 11008, 32000, 4096),
    "llama2-13b": llama_recipe(40, 5120, 40, 40, 13824, 32000, 4096),
    "llama2-70b": llama_recipe(80, 8192, 64, 8, 28672, 32000, 4096),
    "llama3.1-8b": _llama3(32, 4096, 32, 8, 14336, 8.0),
    "llama3.1-70b": _llama3(80, 8192, 64, 8, 28672, 8.0),
    "llama3.1-405b": _llama3(126, 16384, 128, 8, 53248, 8.0),
    "llama3.2-1b": _llama3(16, 2048, 32, 8, 8192, 32.0, tie_embeddings=True),
}

FAMILY = Family(
    "llama",
    ARCHITECTURE,
    _from_hf,
    _to_hf,
    TENSORS,
    PRESETS,
    module="lightning_megatron:LlamaModule",
    default_preset="llama3.1-8b",
    passive=frozenset({"pretraining_tp"}),
)
