"""Memory of one half of a layer, attention or feed-forward, for one micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

RESIDUAL = "residual stream"
ATTENTION = "activations of attention"
MLP = "activations of mlp"
EXPERTS = "activations of experts"
ROUTER = "activations of router"
OF_LAYERS = (RESIDUAL, ATTENTION, MLP, EXPERTS, ROUTER)
"""Causes of what layers keep."""


@dataclass(frozen=True)
class Half:
    """Bytes of one half of a layer; its input, the residual stream, is allocated before it.

    Attributes:
        kept: bytes that stay until its backward, by cause; its input is included, its output is not.
        forward: most bytes during its forward, on top of those before it.
        backward: most bytes during its backward, on top of those before it, which include ``kept`` and the gradient of
            its output.
        deferred: bytes that a split backward keeps for the gradients of its weights.
        gradient: largest temporary of a deferred weight gradient.
        held: bytes that a split backward still needs, and so cannot free, at its fullest moment.
        again: bytes that its backward recomputes first; they are part of ``backward``.
    """

    kept: Mapping[str, int]
    forward: int
    backward: int
    deferred: int = 0
    gradient: int = 0
    held: int = 0
    again: int = 0

    @cached_property
    def size(self) -> int:
        """Bytes that stay until its backward."""
        return sum(self.kept.values())


def recomputed_half(half: Half, kept: Mapping[str, int]) -> Half:
    """Bytes of a half that is recomputed as a whole; ``kept`` stays nevertheless, by cause."""
    again = half.size - sum(kept.values())
    backward = max(half.forward, again + half.backward)
    return Half(kept, half.forward, backward, half.deferred, half.gradient, half.held, again)
