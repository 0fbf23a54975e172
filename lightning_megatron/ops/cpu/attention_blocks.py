"""Attention on a CPU by products of large matrices: all heads of a block of queries with all keys that they see.

torch's kernel for a CPU multiplies small tiles and reaches a third of the speed of a large product. Here a block of
queries takes a few calls for all heads together. Keys that come after the block are skipped. Only the scores of one
block exist at a time; backward computes them again, so that nothing but the operands is saved
(https://arxiv.org/abs/2205.14135).

Scores, their softmax and its gradient are fp32. The three products whose results are rounded to the dtype of the
operands anyway take 16-bit operands, as torch's kernel does.

``torch.compile`` would unroll the blocks: in its graphs forward and backward are an operator each
(``graph_operators.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.by_shape import by_shape
from lightning_megatron.device import multiplies_bf16

ROWS = 128
"""Rows of a block: larger blocks compute more scores that the causal mask hides, smaller ones multiply more slowly."""
FEWEST_QUERIES = 32
SCORE_BYTES = 8 << 20
"""Approximate size of the scores of a block."""
MOST_KEYS = 1024
"""Number of keys up to which this is faster than torch's kernel."""


def takes(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> bool:
    """True if :func:`attention_blocks` supports these operands and is faster for them than torch's kernel."""
    if dropout or torch.is_autocast_enabled(q.device.type):
        return False
    if q.dtype not in (torch.float32, torch.bfloat16) or not q.dtype == k.dtype == v.dtype:
        return False
    return q.shape[0] >= FEWEST_QUERIES and k.shape[0] <= MOST_KEYS


@dataclass(frozen=True)
class _Block:
    """A block of queries.

    Attributes:
        heads: slice of the groups of heads.
        rows: slice of the rows of queries.
        seen: number of keys that some query of the block sees.
        hidden: ``[rows, seen - first hidden]``, minus infinity where a row does not see one of the last keys.
    """

    heads: slice
    rows: slice
    seen: int
    hidden: Tensor | None


def _blocks(groups: int, queries: int, keys: int, repeats: int, first_query: int | None) -> Iterator[_Block]:
    """All blocks.

    Args:
        groups: number of pairs of a sequence and a key head.
        queries: number of queries.
        keys: number of keys.
        repeats: query heads that share a key head; their rows of one query lie side by side.
        first_query: position of the first query among the keys; ``None`` if every query sees all keys.
    """
    step = max(FEWEST_QUERIES, ROWS // repeats)
    size = max(1, SCORE_BYTES // (4 * keys * repeats * step))
    for head in range(0, groups, size):
        for begin in range(0, queries, step):
            end = min(begin + step, queries)
            seen, hidden = keys, None
            if first_query is not None:
                seen = min(keys, end + first_query)
                sees = torch.arange(begin, end).add_(first_query).repeat_interleave(repeats)
                ahead = torch.arange(begin + first_query + 1, seen)
                hidden = torch.zeros(len(sees), len(ahead)).masked_fill_(ahead > sees[:, None], float("-inf"))
            yield _Block(slice(head, head + size), slice(begin * repeats, end * repeats), seen, hidden)


def _by_heads(x: Tensor, groups: int) -> Tensor:
    """``[S, B, N, D] -> [B G, S N/G, D]``."""
    s, b, n, d = x.shape
    return x.reshape(s, b * groups, n // groups, d).transpose(0, 1).flatten(1, 2).contiguous()


def empty_result(like: Tensor, groups: int, features: int = 0) -> Tensor:
    """Uninitialized output, or gradient of an operand ``[S, B, N, D]``, with the strides of the real one.

    Args:
        like: the operand.
        groups: number of key heads.
        features: features of the result; 0 for ``D``.
    """
    s, b, n, d = like.shape
    return _by_tokens(like.new_empty(b * groups, s * n // groups, features or d), like)


def _by_tokens(x: Tensor, like: Tensor) -> Tensor:
    """``[B G, S N/G, V] -> [S, B, N, V]``, with the heads and the dtype of ``like``."""
    by_tokens = x.unflatten(1, (like.shape[0], -1)).transpose(0, 1)
    return by_tokens.reshape(*like.shape[:-1], x.shape[-1]).to(like.dtype)


def _weights(q: Tensor, k: Tensor, block: _Block) -> Tensor:
    """Softmax of a block's scores, fp32.

    Args:
        q: ``[B G, S N/G, D]`` fp32, scaled.
        k: ``[B G, T, D]`` fp32.
        block: the block.
    """
    scores = torch.bmm(q[block.heads, block.rows], k[block.heads, : block.seen].mT)
    if block.hidden is not None and block.hidden.shape[1]:
        scores[..., -block.hidden.shape[1] :].add_(block.hidden)
    return scores.softmax(-1)


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a b`` to an fp32 sum."""
    if a.dtype == total.dtype:
        total.baddbmm_(a, b)
    else:
        total.add_(torch.bmm(a, b))


def _product_dtype(q: Tensor) -> torch.dtype:
    """Dtype of operands whose product is rounded to the dtype of ``q``."""
    return q.dtype if multiplies_bf16(q) else torch.float32


@by_shape
def forward(q: Tensor, k: Tensor, v: Tensor, first_query: int | None) -> Tensor:
    """:func:`attention_blocks` without gradients."""
    groups, dtype = k.shape[2], _product_dtype(q)
    rows, keys, values = (_by_heads(x, groups) for x in (q, k, v))
    rows, keys, values = rows.float() * q.shape[-1] ** -0.5, keys.float(), values.to(dtype)
    out = torch.empty((*rows.shape[:-1], v.shape[-1]), dtype=dtype)
    for block in _blocks(len(rows), len(q), len(k), q.shape[2] // groups, first_query):
        weights = _weights(rows, keys, block).to(dtype)
        out[block.heads, block.rows] = torch.bmm(weights, values[block.heads, : block.seen])
    return _by_tokens(out, q)


@by_shape
def backward(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, first_query: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``q``, ``k`` and ``v`` from that of the result, ``[S, B, N, V]``."""
    groups, dtype, scale = k.shape[2], _product_dtype(q), q.shape[-1] ** -0.5
    rows, keys, values, grad = (_by_heads(x, groups).to(dtype) for x in (q, k, v, dy))
    wide_rows, wide_keys = rows.float() * scale, keys.float()
    wide_values, wide_grad = values.float(), grad.float()
    d_rows, d_keys, d_values = torch.empty_like(rows), torch.zeros_like(wide_keys), torch.zeros_like(wide_values)
    for block in _blocks(len(rows), len(q), len(k), q.shape[2] // groups, first_query):
        here, seen = (block.heads, block.rows), (block.heads, slice(block.seen))
        weights = _weights(wide_rows, wide_keys, block)
        d_weights = torch.bmm(wide_grad[here], wide_values[seen].mT)
        # d softmax: w (dw - sum w dw), in one pass.
        d_scores = torch.ops.aten._softmax_backward_data(d_weights, weights, -1, torch.float32)
        d_scores = d_scores.mul_(scale).to(dtype)
        _add_product_(d_values[seen], weights.to(dtype).mT, grad[here])
        _add_product_(d_keys[seen], d_scores.mT, rows[here])
        d_rows[here] = torch.bmm(d_scores, keys[seen])
    return _by_tokens(d_rows, q), _by_tokens(d_keys, k), _by_tokens(d_values, v)


class _BlocksOfQueries(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, first_query: int | None) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.first_query = first_query
        return forward(q, k, v, first_query)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v = ctx.saved_tensors
        return *backward(dy, q, k, v, ctx.first_query), None


def attention_blocks(q: Tensor, k: Tensor, v: Tensor, first_query: int | None) -> Tensor:
    """:func:`lightning_megatron.ops.attention.attention` without dropout, in blocks of queries.

    Args:
        q: ``[S, B, N, D]``.
        k: ``[T, B, G, D]``.
        v: ``[T, B, G, V]``.
        first_query: position of the first query among the keys; ``None`` if every query sees all keys.
    """
    out: Tensor = _BlocksOfQueries.apply(q, k, v, first_query)
    return out
