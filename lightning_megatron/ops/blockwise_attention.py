"""Exact attention block by block, in plain torch: for long sequences, and for attention computed in parts.

The scores of a block of queries exist only while that block is computed, so that memory does not grow with the square
of the sequence. The backward pass needs one number per query and head, the log-sum-exp of its scores (FlashAttention,
https://arxiv.org/abs/2205.14135, section 3). With these numbers, attention to parts of the keys is merged into
attention to all of them (https://arxiv.org/abs/2305.19370).

Arithmetic is fp32 whatever the inputs (fp64 for fp64).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCK_BYTES = 4 << 20


class PartialAttention(NamedTuple):
    """Attention of queries to a part of the keys.

    Attributes:
        out: ``[S, B, N, D]``, fp32.
        lse: ``[S, B, N]``, fp32, log-sum-exp of the scores.
    """

    out: Tensor
    lse: Tensor


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, first_query: int = 0, block_bytes: int = BLOCK_BYTES
) -> PartialAttention:
    """Attention with the log-sum-exp that its backward pass and :func:`merge_partials_` need; no gradient.

    Args:
        q: ``[S, B, N, D]``.
        k: ``[T, B, G, D]``, ``N`` a multiple of ``G``; head ``n`` of ``q`` reads head ``n // (N / G)``.
        v: ``[T, B, G, D]``.
        causal: True if a query sees only keys up to its own position; keys that no query of a block sees cost nothing.
        first_query: position of the first query among the keys, at least 0.
        block_bytes: approximate limit for the scores of one block.
    """
    grouped = _Grouped.of(q, k.shape[2])
    queries, keys, values = grouped.rows(q), _heads_first(k), _heads_first(v)
    out, lse = torch.empty_like(queries), queries.new_empty(queries.shape[:-1])
    for block in _blocks(queries, keys, causal, first_query, block_bytes):
        scores = block.scores(queries, keys, grouped.scale)
        peak = scores.amax(-1, keepdim=True)
        exps = scores.sub_(peak).exp_()
        total = exps.sum(-1, keepdim=True)
        out[:, :, :, block.rows] = block.shape_of(exps.matmul(values[:, :, block.keys]).div_(total))
        lse[:, :, :, block.rows] = block.shape_of(peak.add_(total.log_())).squeeze(-1)
    return PartialAttention(grouped.back(out), grouped.back(lse))


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    *,
    causal: bool,
    first_query: int = 0,
    block_bytes: int = BLOCK_BYTES,
) -> tuple[Tensor, Tensor, Tensor]:
    """Contribution of these keys to the gradients; probabilities are recomputed from ``lse``.

    If these keys are only a part, ``lse`` and ``delta`` are still those over all keys. Then the gradients of ``q`` over
    the parts add up.

    Args:
        grad: gradient of the output, ``[S, B, N, D]``.
        q: ``[S, B, N, D]``.
        k: ``[T, B, G, D]``.
        v: ``[T, B, G, D]``.
        lse: ``[S, B, N]`` fp32, over all keys.
        delta: ``[S, B, N]`` fp32, the inner product of output and gradient (:func:`row_dot`).
        causal: True if a query sees only keys up to its own position.
        first_query: position of the first query among the keys.
        block_bytes: approximate limit for the scores of one block.

    Returns:
        Gradients of ``q``, ``k`` and ``v``, fp32.
    """
    grouped = _Grouped.of(q, k.shape[2])
    queries, keys, values = grouped.rows(q), _heads_first(k), _heads_first(v)
    grads, lses, deltas = grouped.rows(grad), grouped.rows(lse), grouped.rows(delta)
    dq, dk, dv = torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
    for block in _blocks(queries, keys, causal, first_query, block_bytes):
        q_rows, grad_rows = block.of(queries), block.of(grads)
        scores = block.scores(queries, keys, grouped.scale)
        probabilities = scores.sub_(block.of(lses).unsqueeze(-1)).exp_()
        dv[:, :, block.keys] += probabilities.mT.matmul(grad_rows)
        d_scores = grad_rows.matmul(values[:, :, block.keys].mT)
        d_scores.sub_(block.of(deltas).unsqueeze(-1)).mul_(probabilities).mul_(grouped.scale)
        dq[:, :, :, block.rows] = block.shape_of(d_scores.matmul(keys[:, :, block.keys]))
        dk[:, :, block.keys] += d_scores.mT.matmul(q_rows)
    return grouped.back(dq), dk.permute(2, 0, 1, 3), dv.permute(2, 0, 1, 3)


def row_dot(out: Tensor, grad: Tensor) -> Tensor:
    """``[S, B, N, D], [S, B, N, D] -> [S, B, N]``: the ``delta`` of :func:`attention_backward`."""
    return _upcast(out).mul(_upcast(grad)).sum(-1)


def merge_partials_(whole: PartialAttention, part: PartialAttention) -> None:
    """Merge attention of the same queries to other keys into ``whole``, in place."""
    lse = torch.logaddexp(whole.lse, part.lse)
    kept, added = ((x.lse - lse).exp_().unsqueeze(-1) for x in (whole, part))
    whole.out.mul_(kept).addcmul_(part.out, added)
    whole.lse.copy_(lse)


def blockwise_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, first_query: int = 0) -> Tensor:
    """:func:`lightning_megatron.ops.attention.attention` without dropout, in memory linear in ``S``.

    Args:
        q: ``[S, B, N, D]``.
        k: ``[T, B, G, D]``.
        v: ``[T, B, G, D]``.
        causal: True if a query sees only keys up to its own position.
        first_query: position of the first query among the keys.

    Returns:
        ``[S, B, N, D]``.
    """
    out: Tensor = _BlockwiseAttention.apply(q, k, v, causal, first_query)
    return out


class _BlockwiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, first_query: int) -> Tensor:
        attended = attention_forward(q, k, v, causal=causal, first_query=first_query)
        out = attended.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, attended.lse)
        ctx.causal, ctx.first_query = causal, first_query
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        delta = row_dot(out, grad)
        grads = attention_backward(grad, q, k, v, lse, delta, causal=ctx.causal, first_query=ctx.first_query)
        dq, dk, dv = (part.to(q.dtype) for part in grads)
        return dq, dk, dv, None, None


def _upcast(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _heads_first(x: Tensor) -> Tensor:
    """``[T, B, G, D] -> [B, G, T, D]``, at least fp32."""
    return _upcast(x).permute(1, 2, 0, 3).contiguous()


class _Grouped(NamedTuple):
    """Query heads grouped by their key head: a group's queries are rows of one matrix, and no key is repeated.

    Attributes:
        groups: ``G``.
        scale: factor of the scores.
    """

    groups: int
    scale: float

    @classmethod
    def of(cls, q: Tensor, groups: int) -> _Grouped:
        return cls(groups, 1 / math.sqrt(q.shape[-1]))

    def rows(self, x: Tensor) -> Tensor:
        """``[S, B, N, ...] -> [B, G, N/G, S, ...]``, at least fp32."""
        return _upcast(x).unflatten(2, (self.groups, -1)).movedim(0, 3)

    def back(self, x: Tensor) -> Tensor:
        """``[B, G, N/G, S, ...] -> [S, B, N, ...]``."""
        return x.movedim(3, 0).flatten(2, 3)


class _Block(NamedTuple):
    """A block of queries, and the keys that any of them sees.

    Attributes:
        rows: the queries.
        keys: the keys.
        hidden: ``[queries, last keys]``, True for the last keys that a query does not see; ``None`` if it sees all.
        heads: ``N/G``.
    """

    rows: slice
    keys: slice
    hidden: Tensor | None
    heads: int

    def of(self, x: Tensor) -> Tensor:
        """``[B, G, N/G, S, ...] -> [B, G, N/G x queries, ...]``."""
        return x[:, :, :, self.rows].flatten(2, 3)

    def shape_of(self, x: Tensor) -> Tensor:
        """``[B, G, N/G x queries, ...] -> [B, G, N/G, queries, ...]``."""
        return x.unflatten(2, (self.heads, -1))

    def scores(self, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
        """``[B, G, N/G x queries, keys]``, minus infinity where a key is not seen."""
        scores = self.of(queries).mul(scale).matmul(keys[:, :, self.keys].mT)
        if self.hidden is not None:
            last = self.shape_of(scores)[..., scores.shape[-1] - self.hidden.shape[1] :]
            last.masked_fill_(self.hidden, float("-inf"))
        return scores


def _blocks(queries: Tensor, keys: Tensor, causal: bool, first_query: int, block_bytes: int) -> Iterator[_Block]:
    """Blocks of ``[B, G, N/G, S, D]`` queries against ``[B, G, T, D]`` keys."""
    batch, groups, heads, length, _ = queries.shape
    count = keys.shape[2]
    size = max(1, block_bytes // (batch * groups * heads * count * queries.element_size()))
    for start in range(0, length, size):
        end = min(start + size, length)
        if not causal or first_query + start >= count - 1:
            yield _Block(slice(start, end), slice(0, count), None, heads)
            continue
        seen = min(first_query + end, count)
        # Key first_query + start is on the diagonal: all queries of the block see the keys before it.
        hidden = torch.ones(end - start, seen - first_query - start, dtype=torch.bool, device=queries.device).triu_(1)
        yield _Block(slice(start, end), slice(0, seen), hidden, heads)
