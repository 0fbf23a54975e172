"""Context parallelism on a ring: keys and values travel from rank to rank while the queries stay.

Ring attention (https://arxiv.org/abs/2310.01889): at step ``i`` rank ``r`` holds the keys and values of rank ``r - i``,
attends to them while the next ones are on their way, and merges what it got by the log-sum-exp. No rank ever holds more
than two shards of keys and values.

With the zigzag and a causal mask every step after the first costs half of what it would without the mask, on all ranks
alike. Of the keys of an earlier rank, all queries see the first half and none the second; the keys of a later rank are
seen, all of them, by the second half of the queries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_megatron.comm.p2p import Rotation, start_rotation
from lightning_megatron.mesh import Axis
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
    core: Callable[..., Tensor] | None = None,
    *,
    causal: bool = True,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of this rank's queries to the whole sequence.

    Args:
        q: ``[S/R, B, N, D]``, this rank's zigzag shard.
        k: ``[S/R, B, G, D]``.
        v: like ``k``.
        axis: the context-parallel ranks.
        core: not used: blocks of keys are merged, and not every kernel tells what merging needs.
        causal: whether a token sees only what precedes it.
        dropout: must be 0.

    Returns:
        ``[S/R, B, N, D]``.

    Raises:
        ValueError: for dropout: merging takes the sum of exponentials before anything is dropped.
    """
    if dropout:
        raise ValueError("attention on a ring cannot drop weights: use cp_comm_type='a2a' or 'all_gather'")
    out: Tensor = _Ring.apply(q, k, v, axis, causal)
    return out


class _Seen(NamedTuple):
    """What is attended to in one step.

    Attributes:
        queries: which of this rank's queries take part.
        keys: which of the keys at hand they see.
        causal: whether the mask cuts through these keys.
    """

    queries: slice
    keys: slice
    causal: bool


def seen_at(rank: int, source: int, length: int, causal: bool) -> _Seen:
    """What queries of ``rank`` see of the keys of ``source``, of shards of ``length`` tokens."""
    everything = slice(0, length)
    if not causal or rank == source:
        # Inside a shard the two chunks are in order, so that its own mask is the plain one.
        return _Seen(everything, everything, causal)
    if source < rank:
        return _Seen(everything, slice(0, length // 2), False)
    return _Seen(slice(length // 2, length), everything, False)


def _keys_of_all(k: Tensor, v: Tensor, axis: Axis) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For each rank, this one first and then backwards round the ring: its position, keys and values."""
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
        """Keys and values go round once more; their gradients follow one step behind, each rank adding its part.

        The gradients of rank ``j``'s keys begin on rank ``j + 1`` and come home from rank ``j - 1``.
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
