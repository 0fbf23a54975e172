"""One small model that tests of different parts share."""

from __future__ import annotations

from typing import Any

from lightning_megatron import TransformerConfig


def tiny_llama(**changes: Any) -> TransformerConfig:
    """Two layers of LLaMA, four heads on two query groups; 40 words, 16 positions."""
    shape: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "vocab_size": 40,
        "max_position_embeddings": 16,
        "norm": "rmsnorm",
        "activation": "swiglu",
        "position_embedding": "rope",
        "add_bias_linear": False,
        "tie_embeddings": False,
    }
    return TransformerConfig(**shape | changes)
