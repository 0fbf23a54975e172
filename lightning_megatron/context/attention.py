"""The ways in which context-parallel ranks attend to a sequence that they share, by the name users choose them with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from lightning_megatron.context.gather import gathered_attention
from lightning_megatron.context.ring import ring_attention
from lightning_megatron.context.ulysses import ulysses_attention
from lightning_megatron.mesh import Axis


class ContextAttention(Protocol):
    """Attention of queries, keys and values ``[S/R, B, heads, D]``, zigzag shards, to ``[S/R, B, N, D]``."""

    def __call__(  # noqa: D102
        self, q: Tensor, k: Tensor, v: Tensor, axis: Axis, *, causal: bool = True, dropout: float = 0.0
    ) -> Tensor: ...


CONTEXT_ATTENTION: Mapping[str, ContextAttention] = {
    "p2p": ring_attention,
    "all_gather": gathered_attention,
    "a2a": ulysses_attention,
}
