"""Megatron's names of the tensors of a decoder, in one spelling.

Two implementations of a layer give one tensor two names: Transformer Engine's linear layers hold the norm before them.
Here the plain name stands for both, layers and experts carry their global number, and no tensor is cut::

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
    """True if a tensor is a weight, and not the optimizer's nor the state of a layer's scaling."""
    return not name.startswith(("optimizer", "chained_")) and "_extra_state" not in name


def plain_name(name: str) -> str:
    """The one spelling of a name, but for the numbers of layers and experts."""
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper)
    for fused, plain in _FUSED_NORMS.items():
        name = name.replace(fused, plain)
    return name
