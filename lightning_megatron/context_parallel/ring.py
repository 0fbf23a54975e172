"""Context parallelism on a ring: keys and values move from rank to rank, queries stay.

Ring attention (https://arxiv.org/abs/2310.01889): at step ``i`` rank ``r`` holds the keys and values of rank ``r - i``,
attends to them while the next ones are being sent, and merges the results by their log-sum-exp. No rank ever holds more
than two shards of keys and values.

With zigzag shards and a causal mask, every step after the first costs half of an unmasked step, on all ranks. Of an
earlier rank's keys, all queries see the first half and none sees the second half; all keys of a later rank are seen by
the second half of the queries only. If scores depend on the distance between query and key, each pair of chunks is a
separate attention call; with documents, each document in each pair is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_megatron.comm.p2p import Rotation, start_rotation
from lightning_megatron.context_parallel.zigzag import chunks_of, shard_of
from lightning_megatron.documents import Documents
from lightning_megatron.mesh import Axis
from lightning_megatron.ops.blockwise_attention import (
    PartialAttention,
    PartialKernels,
    add_sinks_,
    kernels_of_parts,
    merge_partials_,
    row_dot,
    sinks_gradient,
)
from lightning_megatron.ops.core.attention_call import AttentionCall


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: AttentionCall,
    axis: Axis,
    core: Callable[..., PartialKernels] = kernels_of_parts,
) -> Tensor:
    """Attention to the whole sequence, with the arguments of :class:`~.attention.ContextAttention`.

    ``core`` returns the kernels of parts that are merged, from the arguments of one rank's attention.

    Raises:
        ValueError: for dropout, since merging needs the sum of exponentials before weights are dropped.
    """
    if call.dropout:
        raise ValueError("attention on a ring cannot drop weights: use cp_comm_type='a2a' or 'all_gather'")
    out: Tensor = _Ring.apply(core(q, k, v, call), q, k, v, call.sinks, axis, call._replace(sinks=None))
    return out


_Place = tuple[slice, slice]
"""Tokens and samples of a tensor."""


class _Seen(NamedTuple):
    """One attention call: a range of queries, and the range of keys that they see.

    Attributes:
        queries: slice of this rank's queries.
        keys: slice of the keys that this rank holds at this step.
        causal: True if the causal mask applies between them.
        first_query: position of the first query among these keys.
        samples: slice of the batch.
    """

    queries: slice
    keys: slice
    causal: bool
    first_query: int = 0
    samples: slice = slice(None)


def seen_at(rank: int, source: int, length: int, causal: bool) -> _Seen:
    """Queries of ``rank`` and keys of ``source`` that they see, in shards of ``length`` tokens."""
    everything = slice(0, length)
    if not causal or rank == source:
        # The two chunks of a shard are in order, so the plain causal mask is right for a shard and itself.
        return _Seen(everything, everything, causal)
    if source < rank:
        return _Seen(everything, slice(0, length // 2), False)
    return _Seen(slice(length // 2, length), everything, False)


def seen_chunks(axis: Axis, source: int, length: int, window: int) -> Iterator[_Seen]:
    """Pairs of this rank's chunks and those of ``source`` that they see at least a part of, under the causal mask."""
    size = length // 2
    for place, chunk in enumerate(chunks_of(axis.rank, axis.size)):
        for there, other in enumerate(chunks_of(source, axis.size)):
            distance = (chunk - other) * size  # from the first key to the first query
            if distance >= 0 and not (window and distance - size + 1 >= window):
                queries, keys = (slice(i * size, (i + 1) * size) for i in (place, there))
                yield _Seen(queries, keys, True, distance)


def seen_in_documents(axis: Axis, source: int, length: int, documents: Documents) -> Iterator[_Seen]:
    """Pairs of a document's tokens in this rank's chunks and in those of ``source``, under the causal mask."""
    size = length // 2
    for place, chunk in enumerate(chunks_of(axis.rank, axis.size)):
        for there, other in enumerate(chunks_of(source, axis.size)):
            queries, keys = (range(i * size, (i + 1) * size) for i in (chunk, other))
            for meeting in documents.meetings(queries, keys):
                rows, seen = _moved(meeting.queries, place * size), _moved(meeting.keys, there * size)
                yield _Seen(rows, seen, True, meeting.first_query, slice(meeting.sequence, meeting.sequence + 1))


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


def _calls(
    axis: Axis, source: int, length: int, whole: AttentionCall
) -> Iterator[tuple[_Place, _Place, AttentionCall]]:
    """Attention calls of this rank for the keys of ``source``, with the places of queries and keys."""
    if whole.documents is not None:
        parts = seen_in_documents(axis, source, length, whole.documents)
    elif whole.rule.by_distance and whole.causal:
        parts = seen_chunks(axis, source, length, whole.rule.window)
    else:
        parts = iter([seen_at(axis.rank, source, length, whole.causal)])
    mask = None if whole.key_mask is None else shard_of(whole.key_mask, source, axis.size, 1)
    for queries, keys, causal, first_query, samples in parts:
        key_mask = None if mask is None else mask[samples, keys]
        call = AttentionCall(causal=causal, first_query=first_query, rule=whole.rule, key_mask=key_mask)
        yield (queries, samples), (keys, samples), call


def _keys_of_all(k: Tensor, v: Tensor, axis: Axis) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Position, keys and values of each rank: this rank first, then backwards round the ring."""
    at_hand, sizes = torch.cat((k, v), dim=-1), (k.shape[-1], v.shape[-1])
    for step in range(axis.size):
        coming = start_rotation(at_hand, axis) if step < axis.size - 1 else None
        keys, values = at_hand.split(sizes, dim=-1)
        yield (axis.rank - step) % axis.size, keys, values
        if coming is not None:
            at_hand = coming.wait()


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernels: PartialKernels,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        axis: Axis,
        whole: AttentionCall,
    ) -> Tensor:
        total = PartialAttention.nothing(q, v.shape[-1])
        for source, keys, values in _keys_of_all(k, v, axis):
            for rows, seen, call in _calls(axis, source, q.shape[0], whole):
                part = kernels.forward(q[rows], keys[seen], values[seen], call)
                merge_partials_(PartialAttention(total.out[rows], total.lse[rows]), part)
        add_sinks_(total, sinks)
        out = total.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, total.lse)
        ctx.kernels, ctx.axis, ctx.whole = kernels, axis, whole
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Send keys and values round the ring again. Their gradients follow one step behind; each rank adds its part.

        The gradients of rank ``j``'s keys start on rank ``j + 1`` and return from rank ``j - 1``.
        """
        q, k, v, sinks, out, lse = ctx.saved_tensors
        axis: Axis = ctx.axis
        delta = row_dot(out, grad)
        dq = torch.zeros_like(q, dtype=lse.dtype)
        sizes = k.shape[-1], v.shape[-1]
        own = dq.new_zeros(*k.shape[:-1], sum(sizes))
        travelling: Rotation | None = None
        for source, keys, values in _keys_of_all(k, v, axis):
            parts = []
            for rows, seen, call in _calls(axis, source, q.shape[0], ctx.whole):
                given = (
                    grad[rows],
                    q[rows],
                    keys[seen],
                    values[seen],
                    PartialAttention(out[rows], lse[rows]),
                    delta[rows],
                    call,
                )
                dq_part, *d_keys = ctx.kernels.backward(*given)
                dq[rows].add_(dq_part)
                parts.append((seen, d_keys))
            others = own if source == axis.rank else torch.zeros_like(own) if travelling is None else travelling.wait()
            for seen, d_keys in parts:
                for gradient, part in zip(others.split(sizes, dim=-1), d_keys, strict=True):
                    gradient[seen].add_(part)
            if source != axis.rank:
                travelling = start_rotation(others, axis)
        if travelling is not None:
            own += travelling.wait()
        dk, dv = own.split(sizes, dim=-1)
        grads = dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), sinks_gradient(sinks, lse, delta)
        return None, *grads, None, None
