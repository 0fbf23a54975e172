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
    """Bytes of one half of a layer; its input is a residual stream that is there before it.

    Attributes:
        kept: bytes that stay until its backward by cause; its input is among them, its output is not.
        forward: most bytes during its forward beyond those before it.
        backward: most bytes during its backward beyond those before it, which include what it keeps and the gradient of
            its output.
        deferred: bytes that a split backward keeps for the gradients of its weights.
        gradient: largest temporary of a weight's gradient that is deferred.
        held: bytes that a split backward cannot free before the fullest moment, as it still needs them.
        again: bytes that its backward makes by a recomputation first; they are part of ``backward``.
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
    """The half if it is recomputed as a whole.

    Args:
        half: the half without recomputation.
        kept: bytes that stay nevertheless, by cause.
    """
    again = half.size - sum(kept.values())
    backward = max(half.forward, again + half.backward)
    return Half(kept, half.forward, backward, half.deferred, half.gradient, half.held, again)
