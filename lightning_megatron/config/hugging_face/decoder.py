"""Entries of ``config.json`` that most decoders since LLaMA share, both ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning_megatron.config.hugging_face.rope import rope_from_hf, rope_to_hf
from lightning_megatron.config.reader import ConfigReader, refuse_uneven_heads

FIXED = {"norm": "rmsnorm", "position_embedding": "rope"}
"""Fields that are the same for all of them."""
SILU = {"silu": "swiglu", "swish": "swiglu"}
"""Gated activations by the name of the function that they apply to the gate."""


def decoder_from_hf(
    reader: ConfigReader,
    activations: Mapping[str, str] = SILU,
    activation_name: str = "hidden_act",
    angles: Callable[[ConfigReader], dict[str, Any]] = rope_from_hf,
) -> dict[str, Any]:
    """Fields of a decoder of LLaMA's kind; biases are left to the family.

    Args:
        activations: gated activations of the family, the usual one first.
        activation_name: entry that names one of them.
        angles: function that reads the rotary embedding.
    """
    heads, usual = reader.required("num_attention_heads"), next(iter(activations))
    activation = reader.expect(activation_name, usual, tuple(activations), "no gated activation of this family")
    return FIXED | {
        "activation": activations.get(activation, activations[usual]),
        "num_layers": reader.required("num_hidden_layers"),
        "hidden_size": reader.required("hidden_size"),
        "num_attention_heads": heads,
        "vocab_size": reader.required("vocab_size"),
        "max_position_embeddings": reader.get("max_position_embeddings", 2048),
        "ffn_hidden_size": reader.required("intermediate_size"),
        "num_query_groups": reader.get("num_key_value_heads", heads, null=True),
        "head_dim": reader.get("head_dim", 0, null=True),
        "norm_epsilon": reader.get("rms_norm_eps", 1e-6),
        **angles(reader),
        "add_bias_linear": False,
        "tie_embeddings": reader.get("tie_word_embeddings", False),
        "init_std": reader.get("initializer_range", 0.02),
        "attention_dropout": reader.get("attention_dropout", 0.0, null=True),
    }


def decoder_to_hf(
    reader: ConfigReader,
    architecture: str,
    activations: Mapping[str, str] = SILU,
    activation_name: str = "hidden_act",
) -> dict[str, Any]:
    """Entries of a decoder of LLaMA's kind; biases are left to the family, arguments are those of the other way."""
    reason = f"not what {architecture} computes"
    for name, only in FIXED.items():
        reader.expect(name, None, (only,), reason)
    activation = reader.expect("activation", None, tuple(dict.fromkeys(activations.values())), reason)
    refuse_uneven_heads(reader, architecture)
    return {
        "num_hidden_layers": reader["num_layers"],
        "hidden_size": reader["hidden_size"],
        "num_attention_heads": reader["num_attention_heads"],
        "num_key_value_heads": reader["num_query_groups"],
        "head_dim": reader["head_dim"],
        "intermediate_size": reader["ffn_hidden_size"],
        "vocab_size": reader["vocab_size"],
        "max_position_embeddings": reader["max_position_embeddings"],
        activation_name: next((name for name, ours in activations.items() if ours == activation), None),
        "rms_norm_eps": reader["norm_epsilon"],
        **rope_to_hf(reader),
        "attention_dropout": reader["attention_dropout"],
        "initializer_range": reader["init_std"],
        "tie_word_embeddings": reader["tie_embeddings"],
    }
