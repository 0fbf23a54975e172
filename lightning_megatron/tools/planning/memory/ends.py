"""Memory of the two ends of a model: the embedding, and the output layer with the loss."""

from __future__ import annotations

from typing import NamedTuple

from lightning_megatron.tools.planning.memory.shapes import Shapes

LOGITS = "logits and loss"
EMBEDDING = "activations of embedding"
BLOCK_OF_LOGITS = 2 << 20
"""Bytes of fp32 logits that one CPU thread processes at a time, as in ``device/memory.py``."""


class End(NamedTuple):
    """Bytes of one end of a model.

    Attributes:
        kept: bytes that stay until its backward.
        forward: most bytes of its forward, on top of those before it.
        backward: most bytes of its backward, on top of those before it, which include ``kept``.
    """

    kept: int
    forward: int
    backward: int


def embedding_end(x: Shapes, *, is_tied: bool = False) -> End:
    """Token and position embeddings, norm, dropout; its output is not among its bytes.

    Args:
        x: tensors of a micro-batch.
        is_tied: True if the output layer of the same stage has made a gradient of the same weight, which autograd adds
            to this one.
    """
    ids = 9 * x.positions if x.tp > 1 else 0
    normed = x.residual + x.norm_statistics if x.config.embedding_norm else 0  # what the norm keeps, its input
    kept = ids + x.mask + normed
    looked_up = 2 * x.whole + x.summed if x.tp > 1 else x.residual
    forward = max(looked_up, 2 * x.residual) if x.config.position_embedding == "learned" else looked_up
    if normed:
        forward = max(forward, normed + x.norm_copies + x.residual)
    whole = x.whole if x.tp > 1 else 0
    backward = max(x.returned(x.vocabulary) + whole, x.item * x.vocabulary + 2 * whole)
    if is_tied:
        backward = max(backward, 2 * x.grad_item * x.vocabulary)
    if x.kernels.adds_gradients:
        backward = 2 * whole + (x.whole * 4 // x.item if x.cast else 0)
    if x.config.position_embedding == "learned":
        backward = max(backward, x.returned(x.config.max_position_embeddings * x.config.hidden_size) + x.residual)
    if normed:
        backward = max(backward, x.norm_gradients)
    return End(kept, forward, backward)


def waiting_gradient(x: Shapes) -> int:
    """Gradient of the output layer, held until that of the embedding is ready if both share one weight."""
    return 0 if x.kernels.adds_gradients else x.grad_item * x.vocabulary


def loss_end(x: Shapes) -> End:
    """Final norm, output layer and loss; both gradients are computed in the forward, chunk by chunk."""
    kept = x.norm_statistics + x.whole + x.item * x.vocabulary
    tokens, rows = x.logits_chunk, x.vocabulary_rows
    streams = x.kernels.blocks_of_logits and x.tp == 1
    at_a_time = min(tokens, max(1, BLOCK_OF_LOGITS // (4 * rows))) if streams else tokens
    copies = (x.item < 4) + bool(x.config.logit_softcap)  # in fp32: the logits, and the derivative of their soft cap
    chunk = max(tokens * rows * x.item + 4 * at_a_time * rows * copies, tokens * (rows + x.config.hidden_size) * x.item)
    normed = x.gathered or x.residual
    forward = max(x.norm_copies + x.residual, x.residual + x.gathered, normed + kept + chunk)
    copied = 0 if x.kernels.adds_gradients else x.cast * x.vocabulary
    backward = max(copied, x.gathered + x.residual, x.norm_gradients)
    return End(kept, forward, backward)
