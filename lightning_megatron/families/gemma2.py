"""Gemma 2: norms before and after, bounded scores and logits, layers with and without a window, scaled embeddings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_megatron.config.hugging_face.decoder import decoder_from_hf, decoder_to_hf
from lightning_megatron.config.hugging_face.family import Family, Recipe
from lightning_megatron.config.hugging_face.rope import rope_from_hf
from lightning_megatron.config.hugging_face.tensors import QKV, STACKED, Tensors, in_layers, rule
from lightning_megatron.config.hugging_face.windows import kinds_to_hf, layer_windows_from_hf, window_from_hf
from lightning_megatron.config.reader import ConfigReader
from lightning_megatron.config.transformer import TransformerConfig

ARCHITECTURE = "Gemma2ForCausalLM"
ACTIVATIONS = {"gelu_pytorch_tanh": "geglu_tanh", "gelu": "geglu"}
SHARED: dict[str, Any] = {
    "norm": "rmsnorm",
    "norm_epsilon": 1e-6,
    "norm_zero_centered": True,
    "post_norms": True,
    "activation": "geglu_tanh",
    "position_embedding": "rope",
    "add_bias_linear": False,
    "tie_embeddings": True,
}
"""Fields that all Gemmas have."""


def gemma_from_hf(
    reader: ConfigReader,
    has_window: Callable[[int], bool],
    angles: Callable[[ConfigReader], dict[str, Any]] = rope_from_hf,
) -> dict[str, Any]:
    """Fields of Gemma 2 and 3.

    Args:
        has_window: function of a layer's number that returns True if it has a window, for files that do not say.
        angles: function that reads the rotary embedding.
    """
    reader.expect("attention_bias", False, (False,), "no linear layer has a bias")
    reader.expect("use_bidirectional_attention", None, (None, False), "a token sees only those before it")
    found = decoder_from_hf(reader, ACTIVATIONS, "hidden_activation", angles)
    windows = layer_windows_from_hf(reader, found["num_layers"], window_from_hf(reader), has_window)
    scalar = reader.get("query_pre_attn_scalar", 256.0)
    if scalar <= 0:
        reader.refuse("query_pre_attn_scalar", scalar, "must be above 0")
    has_own_scale = scalar > 0 and scalar != found["head_dim"]
    return {
        **SHARED,
        **found,
        **windows,
        "attention_scale": scalar**-0.5 if has_own_scale else 0.0,
        "attention_softcap": _bound(reader, "attn_logit_softcapping"),
        "logit_softcap": _bound(reader, "final_logit_softcapping"),
        "embedding_scale": found["hidden_size"] ** 0.5,
    }


def _bound(reader: ConfigReader, name: str) -> float:
    """A bound of scores or logits; null stands for none."""
    bound = reader.get(name, None)
    if bound is None:
        return 0.0
    if isinstance(bound, bool) or not isinstance(bound, int | float) or bound <= 0:
        reader.refuse(name, bound, "must be a number above 0, or null", (None,))
        return 0.0
    return float(bound)


def _from_hf(reader: ConfigReader) -> dict[str, Any]:
    return gemma_from_hf(reader, lambda number: number % 2 == 0)


def gemma_to_hf(reader: ConfigReader, architecture: str) -> dict[str, Any]:
    """Entries that Gemma 2 and 3 write alike."""
    for name, only in (("norm_zero_centered", True), ("post_norms", True), ("add_bias_linear", False)):
        reader.expect(name, None, (only,), f"not what {architecture} computes")
    hidden, scale = reader["hidden_size"], reader["attention_scale"]
    reader.expect("embedding_scale", None, (hidden**0.5,), f"{architecture} takes the root of hidden_size={hidden}")
    written = decoder_to_hf(reader, architecture, ACTIVATIONS, "hidden_activation")
    scalar = round(scale**-2, 6) if scale else reader["head_dim"]
    return {
        **written,
        **kinds_to_hf(reader),
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "attn_logit_softcapping": reader["attention_softcap"] or None,
        "final_logit_softcapping": reader["logit_softcap"] or None,
        "attention_bias": False,
    }


def _to_hf(reader: ConfigReader) -> dict[str, Any]:
    return gemma_to_hf(reader, ARCHITECTURE)


TENSORS = Tensors(
    (
        rule("embedding.word.weight", "model.embed_tokens.weight", tied="lm_head.weight"),
        *in_layers(
            "layers.{n}.",
            "model.layers.{n}.",
            rule("attention_norm.weight", "input_layernorm.weight"),
            rule("attention.qkv.weight", *(f"self_attn.{part}_proj.weight" for part in "qkv"), kind=QKV),
            rule("attention.out.weight", "self_attn.o_proj.weight"),
            rule("attention_post_norm.weight", "post_attention_layernorm.weight"),
            rule("mlp_norm.weight", "pre_feedforward_layernorm.weight"),
            rule("mlp.fc1.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", kind=STACKED),
            rule("mlp.fc2.weight", "mlp.down_proj.weight"),
            rule("mlp_post_norm.weight", "post_feedforward_layernorm.weight"),
        ),
        rule("head.norm.weight", "model.norm.weight"),
        rule("head.weight", "lm_head.weight"),
    )
)


def gemma_recipe(
    layers: int, hidden: int, heads: int, groups: int, ffn: int, vocab: int, positions: int, **other: Any
) -> Recipe:
    """Recipe of a shape with Gemma's blocks."""
    sizes = {"ffn_hidden_size": ffn, "num_query_groups": groups, "head_dim": 256, "embedding_scale": hidden**0.5}
    return partial(TransformerConfig, layers, hidden, heads, vocab, positions, **SHARED | sizes | other)


def _gemma2(
    layers: int, hidden: int, heads: int, groups: int, ffn: int, vocab: int, positions: int, **other: Any
) -> Recipe:
    family = {"sliding_window": 4096, "sliding_window_layers": tuple(range(0, layers, 2))}
    bounds = {"attention_softcap": 50.0, "logit_softcap": 30.0}
    return gemma_recipe(layers, hidden, heads, groups, ffn, vocab, positions, **family | bounds | other)


# config.json of https://huggingface.co/google/gemma-2-*.
PRESETS = {
    "gemma2-tiny": _gemma2(4, 256, 8, 4, 1024, 32000, 2048, head_dim=32, sliding_window=128),
    "gemma2-2b": _gemma2(26, 2304, 8, 4, 9216, 256000, 8192),
    "gemma2-9b": _gemma2(42, 3584, 16, 8, 14336, 256000, 8192),
    "gemma2-27b": _gemma2(46, 4608, 32, 16, 36864, 256000, 8192, head_dim=128, attention_scale=144**-0.5),
}

FAMILY = Family(
    "gemma2",
    ARCHITECTURE,
    _from_hf,
    _to_hf,
    TENSORS,
    PRESETS,
    defaults={
        "max_position_embeddings": 8192,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
        "tie_word_embeddings": True,
    },
    passive=frozenset({"hidden_act", "cache_implementation"}),
)
