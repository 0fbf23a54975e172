"""Context parallelism on a ring: keys and values move from rank to rank, queries stay.

Ring attention (https://arxiv.org/abs/2310.01889): at step ``i`` rank ``r`` holds the keys and values of rank ``r - i``,
attends to them while the next ones are being sent, and merges the results by their log-sum-exp. No rank ever holds more
than two shards of keys and values.

With zigzag shards and a causal mask, every step after the first costs half of an unmasked step, on all ranks. All
queries see the first half of an earlier rank's keys and none the second half; the second half of the queries sees all
keys of a later rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_megatron.comm.p2p import Rotation, start_rotation
from lightning_megatron.mesh import Axis
from lightning_megatron.ops.attention import attention
from lightning_megatron.ops.blockwise_attention import (
    PartialAttention,
    attention_backward,
    attention_forward,
    merge_partials_,
    row_dot,
)


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: Axis,
    core: Callable[..., Tensor] = attention,
    *,
    causal: bool = True,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of this rank's queries to the whole sequence.

    Args:
        q: ``[S/R, B, N, D]``, this rank's zigzag shard.
        k: ``[S/R, B, G, D]``.
        v: ``[S/R, B, G, D]``.
        axis: context-parallel ranks.
        core: attention on one rank; unused, see
            :class:`~lightning_megatron.context_parallel.attention.ContextAttention`.
        causal: True if a token sees only the tokens before it and itself.
        dropout: must be 0.

    Returns:
        ``[S/R, B, N, D]``.

    Raises:
        ValueError: for dropout, since merging needs the sum of exponentials before weights are dropped.
    """
    if dropout:
        raise ValueError("attention on a ring cannot drop weights: use cp_comm_type='a2a' or 'all_gather'")
    out: Tensor = _Ring.apply(q, k, v, axis, causal)
    return out


class _Seen(NamedTuple):
    """Queries and keys of one step.

    Attributes:
        queries: slice of this rank's queries that take part.
        keys: slice of the present keys that they see.
        causal: True if the mask applies between them.
    """

    queries: slice
    keys: slice
    causal: bool


def seen_at(rank: int, source: int, length: int, causal: bool) -> _Seen:
    """Queries of ``rank`` and keys of ``source`` that they see, in shards of ``length`` tokens."""
    everything = slice(0, length)
    if not causal or rank == source:
        # Inside a shard the two chunks are in order, so its own mask is the plain causal one.
        return _Seen(everything, everything, causal)
    if source < rank:
        return _Seen(everything, slice(0, length // 2), False)
    return _Seen(slice(length // 2, length), everything, False)


def _keys_of_all(k: Tensor, v: Tensor, axis: Axis) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Position, keys and values of each rank: this rank first, then backwards round the ring."""
    at_hand = torch.stack((k, v))
    for step in range(axis.size):
        coming = start_rotation(at_hand, axis) if step < axis.size - 1 else None
        yield (axis.rank - step) % axis.size, at_hand[0], at_hand[1]
        if coming is not None:
            at_hand = coming.wait()


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: Axis, causal: bool) -> Tensor:
        length = q.shape[0]
        total: PartialAttention | None = None
        for source, keys, values in _keys_of_all(k, v, axis):
            seen = seen_at(axis.rank, source, length, causal)
            part = attention_forward(q[seen.queries], keys[seen.keys], values[seen.keys], causal=seen.causal)
            if total is None:
                total = part
                continue
            merge_partials_(PartialAttention(total.out[seen.queries], total.lse[seen.queries]), part)
        assert total is not None
        out = total.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, total.lse)
        ctx.axis, ctx.causal = axis, causal
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Send keys and values round once more; their gradients follow one step behind, and each rank adds its part.

        The gradients of rank ``j``'s keys start on rank ``j + 1`` and return from rank ``j - 1``.
        """
        q, k, v, out, lse = ctx.saved_tensors
        axis: Axis = ctx.axis
        delta = row_dot(out, grad)
        dq: Tensor
        own: Tensor
        travelling: Rotation | None = None
        for source, keys, values in _keys_of_all(k, v, axis):
            seen = seen_at(axis.rank, source, q.shape[0], ctx.causal)
            rows = seen.queries
            dq_part, *d_keys = attention_backward(
                grad[rows], q[rows], keys[seen.keys], values[seen.keys], lse[rows], delta[rows], causal=seen.causal
            )
            if source == axis.rank:  # the first step
                dq, own = dq_part, torch.stack(d_keys)
                continue
            dq[rows] += dq_part
            others = torch.zeros_like(own) if travelling is None else travelling.wait()
            for gradient, part in zip(others, d_keys, strict=True):
                gradient[seen.keys] += part
            travelling = start_rotation(others, axis)
        if travelling is not None:
            own += travelling.wait()
        return dq.to(q.dtype), own[0].to(k.dtype), own[1].to(v.dtype), None, None
