"""Exact attention block by block, in plain torch: for long sequences, and for attention computed in parts.

The scores of a block of queries exist only while that block is computed, so that memory does not grow with the square
of the sequence. The backward pass needs one number per query and head, the log-sum-exp of its scores (FlashAttention,
https://arxiv.org/abs/2205.14135, section 3). With these numbers, attention to parts of the keys is merged into
attention to all of them (https://arxiv.org/abs/2305.19370).

Arithmetic is fp32 whatever the inputs (fp64 for fp64).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_megatron.by_shape import by_shape
from lightning_megatron.config.score_rule import ScoreRule
from lightning_megatron.device import as_result
from lightning_megatron.ops.core.attention_call import AttentionCall
from lightning_megatron.ops.flash.flash_attention import beyond_flash, flash_backward, flash_forward
from lightning_megatron.ops.implementation import Function, Implementation, Op

BLOCK_BYTES = 4 << 20
"""Scores of a block that stay in a processor's caches."""
LARGE_BLOCK_BYTES = 256 << 20
"""Scores of a block where each operation has a start of its own, as on an accelerator."""


class PartialAttention(NamedTuple):
    """Attention of queries to a part of the keys.

    Attributes:
        out: ``[S, B, N, V]``, fp32, ``V`` the features of a value; 0 for a query that sees none of these keys.
        lse: ``[S, B, N]``, fp32, log-sum-exp of the scores; minus infinity or the lowest number for such a query.
    """

    out: Tensor
    lse: Tensor

    @classmethod
    def nothing(cls, q: Tensor, features: int) -> PartialAttention:
        """Attention of queries ``[S, B, N, D]`` to no keys, for values of that number of features."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        # A finite log-sum-exp, so that merging two parts without keys makes no NaN.
        lse = q.new_full(q.shape[:-1], torch.finfo(dtype).min, dtype=dtype)
        return cls(q.new_zeros(*q.shape[:-1], features, dtype=dtype), lse)


@by_shape
def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, *, block_bytes: int | None = None
) -> PartialAttention:
    """Attention with the log-sum-exp that its backward pass and :func:`merge_partials_` need; no gradient.

    Args:
        q: ``[S, B, N, D]``.
        k: ``[T, B, G, D]``, ``N`` a multiple of ``G``; head ``n`` of ``q`` reads head ``n // (N / G)``.
        v: ``[T, B, G, V]``.
        call: the computation, without dropout, sinks and bias. Keys that no query of a block sees cost nothing.
        block_bytes: approximate limit for the scores of one block; ``None`` for the one of the device.
    """
    grouped, rule = _Grouped(k.shape[2]), call.rule
    queries, keys, values = grouped.rows(q), _heads_first(k), _heads_first(v)
    # In the memory order of q: callers flatten the heads of a token, which would otherwise copy.
    out = grouped.rows(queries.new_zeros(*q.shape[:-1], v.shape[-1]))
    lse = queries.new_full(queries.shape[:-1], float("-inf"))
    lowest = torch.finfo(queries.dtype).min
    for block in _blocks(queries, keys, call, block_bytes):
        scores = block.by_place_(block.scores(queries, keys, rule), rule)
        peak = scores.amax(-1, keepdim=True)
        if rule.window or call.key_mask is not None:
            # A query may see no key: its exponentials are 0, its log-sum-exp minus infinity.
            peak = peak.clamp_(min=lowest)
        exps = scores.sub_(peak).exp_()
        total = exps.sum(-1, keepdim=True)
        out[:, :, :, block.rows] = block.shape_of(exps.matmul(values[:, :, block.keys]).div_(total.clamp(min=1.0)))
        lse[:, :, :, block.rows] = block.shape_of(peak.add_(total.log_())).squeeze(-1)
    return PartialAttention(grouped.back(out), grouped.back(lse))


@by_shape
def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    call: AttentionCall,
    *,
    block_bytes: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Contribution of these keys to the gradients; probabilities are recomputed from ``lse``.

    If these keys are only a part, ``lse`` and ``delta`` are still those over all keys. Then the gradients of ``q`` over
    the parts add up.

    Args:
        grad: gradient of the output, ``[S, B, N, V]``.
        q: ``[S, B, N, D]``.
        k: ``[T, B, G, D]``.
        v: ``[T, B, G, V]``.
        lse: ``[S, B, N]`` fp32, over all keys.
        delta: ``[S, B, N]`` fp32, the inner product of output and gradient (:func:`row_dot`).
        call: the computation.
        block_bytes: approximate limit for the scores of one block; ``None`` for the one of the device.

    Returns:
        Gradients of ``q``, ``k`` and ``v``, fp32.
    """
    grouped, rule = _Grouped(k.shape[2]), call.rule
    queries, keys, values = grouped.rows(q), _heads_first(k), _heads_first(v)
    grads, lses, deltas = grouped.rows(grad), grouped.rows(lse), grouped.rows(delta)
    dq, dk, dv = torch.zeros_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
    if rule.window or call.key_mask is not None:
        lses = lses.clamp(min=torch.finfo(lses.dtype).min)  # a query may see no key
    scale = rule.factor(q.shape[-1])
    for block in _blocks(queries, keys, call, block_bytes):
        q_rows, grad_rows = block.of(queries), block.of(grads)
        scores = block.scores(queries, keys, rule)
        # d c tanh(x / c) = 1 - tanh^2, computed before scores are hidden.
        steepness = 1 - (scores / rule.softcap).square_() if rule.softcap else None
        probabilities = block.by_place_(scores, rule).sub_(block.of(lses).unsqueeze(-1)).exp_()
        dv[:, :, block.keys] += probabilities.mT.matmul(grad_rows)
        d_scores = grad_rows.matmul(values[:, :, block.keys].mT)
        d_scores.sub_(block.of(deltas).unsqueeze(-1)).mul_(probabilities).mul_(scale)
        if steepness is not None:
            d_scores.mul_(steepness)
        dq[:, :, :, block.rows] = block.shape_of(d_scores.matmul(keys[:, :, block.keys]))
        dk[:, :, block.keys] += d_scores.mT.matmul(q_rows)
    return grouped.back(dq), dk.permute(2, 0, 1, 3), dv.permute(2, 0, 1, 3)


def row_dot(out: Tensor, grad: Tensor) -> Tensor:
    """``[S, B, N, V], [S, B, N, V] -> [S, B, N]``: the ``delta`` of :func:`attention_backward`."""
    return _upcast(out).mul(_upcast(grad)).sum(-1)


def merge_partials_(whole: PartialAttention, part: PartialAttention) -> None:
    """Merge attention of the same queries to other keys into ``whole``, in place, by their log-sum-exp."""
    share = torch.sub(part.lse, whole.lse).sigmoid().unsqueeze(-1)
    whole.out.addcmul_(part.out - whole.out, share)
    whole.lse.copy_(torch.logaddexp(whole.lse, part.lse))


def add_sinks_(whole: PartialAttention, sinks: Tensor | None) -> None:
    """Add a sink ``[N]`` to each head, in place: one more key, which every query sees, with a value of 0."""
    if sinks is not None:
        merge_partials_(whole, PartialAttention(whole.out.new_zeros(()), _upcast(sinks).expand_as(whole.lse)))


def sinks_gradient(sinks: Tensor | None, lse: Tensor, delta: Tensor) -> Tensor | None:
    """Gradient of sinks ``[N]``, from log-sum-exp and ``delta`` over all keys and sinks; ``None`` without sinks."""
    return None if sinks is None else -(sinks - lse).exp_().mul_(delta).sum((0, 1)).to(sinks.dtype)


class PartialKernels(NamedTuple):
    """Functions by which attention to a part of the keys is computed.

    Attributes:
        forward: :func:`attention_forward`, or another function with its arguments and result.
        backward: gradients of queries, keys and values, from the gradient of the output, queries, keys and values,
            attention to all keys, its ``delta``, and the call.
    """

    forward: Callable[..., PartialAttention]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def _blocks_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: PartialAttention, delta: Tensor, call: AttentionCall
) -> tuple[Tensor, Tensor, Tensor]:
    return attention_backward(grad, q, k, v, whole.lse, delta, call)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> PartialAttention:
    return PartialAttention(*flash_forward(q, k, v, call))


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: PartialAttention, delta: Tensor, call: AttentionCall
) -> tuple[Tensor, Tensor, Tensor]:
    return flash_backward(grad, q, k, v, *whole, call)


BLOCKS = PartialKernels(attention_forward, _blocks_backward)
FLASH = PartialKernels(_flash_forward, _flash_backward)


def attention_by(kernels: PartialKernels, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """:func:`lightning_megatron.ops.attention.attention` in memory linear in ``S``, with a dropout of 0.

    A query that sees no key has output 0.
    """
    assert not call.dropout
    out: Tensor = _AttentionWithSum.apply(kernels, q, k, v, call.sinks, call._replace(sinks=None))
    return out


blockwise_attention: Callable[..., Tensor] = partial(attention_by, BLOCKS)
flash_attention: Callable[..., Tensor] = partial(attention_by, FLASH)


def _flash_kernels(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> PartialKernels:
    return FLASH


def _block_kernels(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> PartialKernels:
    return BLOCKS


def kernels_of_parts(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> PartialKernels:
    """Kernels by which parts of the keys are attended to and merged, for a call of ``attention`` on one rank."""
    kernels: PartialKernels = PARTS.on(q.device.type)(q, k, v, call)
    return kernels


def _beyond_blocks(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> str | None:
    if call.bias is not None:
        return "a bias of the scores"
    if call.key_mask is not None:
        return "padding among the keys"
    return "dropout of weights" if call.dropout else None


_FLASH, _BLOCKS = "flash with its log-sum-exp", "block by block"
WITH_SUM: Implementation[Function] = Implementation(
    _FLASH, "cuda", lambda: flash_attention, unsupported=beyond_flash, recomputes=True
)
BLOCKWISE: Implementation[Function] = Implementation(
    _BLOCKS, None, lambda: blockwise_attention, unsupported=_beyond_blocks, recomputes=True
)
PARTS = Op(
    "attention",
    (
        Implementation(_FLASH, "cuda", lambda: _flash_kernels, unsupported=beyond_flash),
        Implementation(_BLOCKS, None, lambda: _block_kernels),
    ),
    run=kernels_of_parts,
    reference=_block_kernels,
)
"""Kernels of parts of the keys that are merged."""


class _AttentionWithSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernels: PartialKernels,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        call: AttentionCall,
    ) -> Tensor:
        ctx.kernels, ctx.call = kernels, call
        attended = kernels.forward(q, k, v, call)
        add_sinks_(attended, sinks)
        out = attended.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, attended.lse)
        return as_result(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        delta = row_dot(out, grad)
        grads = ctx.kernels.backward(grad, q, k, v, PartialAttention(out, lse), delta, ctx.call)
        own = sinks_gradient(sinks, lse, delta)
        return None, *(part.to(q.dtype) for part in grads), own, None


def _upcast(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _heads_first(x: Tensor) -> Tensor:
    """``[T, B, G, D] -> [B, G, T, D]``, at least fp32."""
    return _upcast(x).permute(1, 2, 0, 3).contiguous()


class _Grouped(NamedTuple):
    """Query heads grouped by their key head: a group's queries are rows of one matrix, so that keys are not repeated.

    Attributes:
        groups: ``G``.
    """

    groups: int

    def rows(self, x: Tensor) -> Tensor:
        """``[S, B, N, ...] -> [B, G, N/G, S, ...]``, at least fp32."""
        return _upcast(x).unflatten(2, (self.groups, -1)).movedim(0, 3)

    def back(self, x: Tensor) -> Tensor:
        """``[B, G, N/G, S, ...] -> [S, B, N, ...]``."""
        return x.movedim(3, 0).flatten(2, 3)


class _Edge(NamedTuple):
    """Keys of a block that only some of its queries see.

    Attributes:
        keys: the keys, counted from the first one of the block.
        hidden: ``[queries, keys]``, True where a query does not see a key.
    """

    keys: slice
    hidden: Tensor


class _Block(NamedTuple):
    """A block of queries, and the keys that any of them sees.

    Attributes:
        rows: the queries.
        first: position of the first query among all keys.
        keys: the keys.
        edges: keys that not all of them see.
        unseen: ``[B, 1, 1, keys]``, True for keys that none of a sample's queries sees; ``None`` if there are none.
        heads: ``N/G``.
    """

    rows: slice
    first: int
    keys: slice
    edges: tuple[_Edge, ...]
    unseen: Tensor | None
    heads: int

    def of(self, x: Tensor) -> Tensor:
        """``[B, G, N/G, S, ...] -> [B, G, N/G x queries, ...]``."""
        return x[:, :, :, self.rows].flatten(2, 3)

    def shape_of(self, x: Tensor) -> Tensor:
        """``[B, G, N/G x queries, ...] -> [B, G, N/G, queries, ...]``."""
        return x.unflatten(2, (self.heads, -1))

    def scores(self, queries: Tensor, keys: Tensor, rule: ScoreRule) -> Tensor:
        """Scores ``[B, G, N/G x queries, keys]`` before :meth:`by_place_`: without ALiBi, and of hidden keys too."""
        scores = self.of(queries).mul(rule.factor(queries.shape[-1])).matmul(keys[:, :, self.keys].mT)
        return scores.div_(rule.softcap).tanh_().mul_(rule.softcap) if rule.softcap else scores

    def by_place_(self, scores: Tensor, rule: ScoreRule) -> Tensor:
        """Add ALiBi to the scores, and set those of unseen keys to minus infinity."""
        if rule.slopes:
            like: dict[str, Any] = {"dtype": scores.dtype, "device": scores.device}
            queries = torch.arange(self.first, self.first + self.rows.stop - self.rows.start, **like)
            distance = torch.arange(self.keys.start, self.keys.stop, **like) - queries[:, None]
            self.shape_of(scores).addcmul_(scores.new_tensor(rule.slopes).view(-1, self.heads, 1, 1), distance)
        for keys, hidden in self.edges:
            self.shape_of(scores)[..., keys].masked_fill_(hidden, float("-inf"))
        return scores if self.unseen is None else scores.masked_fill_(self.unseen, float("-inf"))


def _blocks(queries: Tensor, keys: Tensor, call: AttentionCall, block_bytes: int | None) -> Iterator[_Block]:
    """Blocks of ``[B, G, N/G, S, D]`` queries against ``[B, G, T, D]`` keys, without those that see no key."""
    batch, groups, heads, length, _ = queries.shape
    count, causal, window = keys.shape[2], call.causal, call.rule.window
    span = min(count, 2 * window) if window else count
    if block_bytes is None:
        block_bytes = BLOCK_BYTES if queries.device.type == "cpu" else LARGE_BLOCK_BYTES
    size = max(1, block_bytes // max(1, batch * groups * heads * span * queries.element_size()))
    if window:  # larger blocks would compute more scores outside of the window
        size = min(size, max(window, 64))
    for start in range(0, length, size):
        end = min(start + size, length)
        first, last = call.first_query + start, call.first_query + end - 1  # positions of the queries
        begin = max(0, first - window + 1) if window else 0
        seen = min(last + 1, count) if causal else count
        if begin < seen:
            edges = tuple(_edges(range(first, last + 1), range(begin, seen), causal, window, queries.device))
            unseen = None if call.key_mask is None else ~call.key_mask[:, None, None, begin:seen]
            yield _Block(slice(start, end), first, slice(begin, seen), edges, unseen, heads)


def _edges(queries: range, keys: range, causal: bool, window: int, device: torch.device) -> Iterator[_Edge]:
    """Keys at positions that only some queries see."""
    positions = torch.arange(queries.start, queries.stop, device=device).unsqueeze(1)
    if causal and queries.start + 1 < keys.stop:
        late = range(max(queries.start + 1, keys.start), keys.stop)
        ahead = torch.arange(late.start, late.stop, device=device) > positions
        yield _Edge(slice(late.start - keys.start, None), ahead)
    if window and keys.start <= queries[-1] - window:
        early = range(keys.start, min(keys.stop, queries[-1] - window + 1))
        behind = torch.arange(early.start, early.stop, device=device) <= positions - window
        yield _Edge(slice(0, len(early)), behind)
