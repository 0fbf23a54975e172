"""Megatron's names of tensors, in one spelling.

Two implementations of a layer may name a tensor differently: Transformer Engine's linear layers hold the norm before
them. Here one name stands for both, layers and experts have their global number, and every tensor is whole::

    embedding.word_embeddings.weight            [V padded, H]
    embedding.position_embeddings.weight        [P, H]
    decoder.layers.0.input_layernorm.weight     [H]          pre_mlp_layernorm.weight alike
    ... .self_attention.linear_qkv.weight       [(N + 2 G) D, H], rows [q.., k, v] of each query group
    ... .self_attention.linear_proj.weight      [H, N D]
    ... .mlp.linear_fc1.weight                  [F, H], or [2 F, H]: all gates, then all ups
    ... .mlp.linear_fc2.weight                  [H, F]
    ... .mlp.router.weight                      [E, H]
    ... .mlp.experts.3.linear_fc1.weight        as above
    decoder.final_layernorm.weight              [H]
    output_layer.weight                         [V padded, H]
"""

from __future__ import annotations

LAYERS = "decoder.layers."

_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
_WRAPPERS = ("module.", "model.")


def is_of_model(name: str) -> bool:
    """True for a weight; False for optimizer state and for ``_extra_state``, a layer's scaling factors."""
    return not name.startswith(("optimizer", "chained_")) and "_extra_state" not in name


def plain_name(name: str) -> str:
    """A name in this module's spelling; numbers of layers and experts stay as they are."""
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper)
    for fused, plain in _FUSED_NORMS.items():
        name = name.replace(fused, plain)
    return name
