"""Cross entropy over a vocabulary that is sharded over the tensor-parallel ranks.

A rank has its slice of the logits. The other ranks need four numbers per token from it: the slice's maximum, the
sum of exponentials relative to it, the target's logit, and the sum of logits (for label smoothing). One all-gather
communicates them, and everything else is local. All arithmetic on logits is fp32.

:func:`linear_cross_entropy` never holds all logits: it processes the tokens in chunks and computes the gradients of a
chunk together with its logits, so that memory and page faults do not grow with the vocabulary.
:func:`linear_token_losses`, whose caller weights the losses, computes the logits of each chunk a second time, in the
backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.by_shape import by_shape
from lightning_megatron.comm.collectives import all_gather
from lightning_megatron.device import cache_bytes
from lightning_megatron.mesh import Axis
from lightning_megatron.ops.accumulate import add_
from lightning_megatron.ops.matmul import matmul_fp32, product, upcasts
from lightning_megatron.weight_grad_store import WeightGradStore

IGNORE_INDEX = -100
CHUNK_BYTES = 32 << 20
_MOST_16_BIT_CHUNKS = 8
_FP16_HEADROOM = 256.0
_Multiply = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class VocabSlice:
    """This rank's part of the vocabulary.

    Attributes:
        axis: ranks that share the vocabulary.
        first: first token id of the slice.
        size: number of token ids in it, without padding.
        total: true size of the vocabulary.
    """

    axis: Axis
    first: int
    size: int
    total: int

    @classmethod
    def of(cls, axis: Axis, padded_rows: int, total: int) -> VocabSlice:
        """The slice of a rank whose weight has ``padded_rows`` rows, of a vocabulary of ``total``."""
        first = min(axis.rank * padded_rows, total)
        return cls(axis, first, max(0, min(padded_rows, total - axis.rank * padded_rows)), total)


@dataclass(frozen=True)
class _Rule:
    """Definition of the loss of logits.

    Attributes:
        smoothing: share of the target's probability that goes to all tokens.
        softcap: bound ``c`` of the logits, ``c tanh(logit / c)``; 0 for none.
    """

    smoothing: float = 0.0
    softcap: float = 0.0


@dataclass
class _Chunk:
    """Results of a chunk's forward that its gradient needs. ``V`` is the slice of the vocabulary, ``T`` the tokens."""

    exps: Tensor  # [T, V] fp32, exp(logits - peak), in the place of the logits
    peak: Tensor  # [T], this slice's largest logit
    log_sum_exp: Tensor  # [T]
    loss: Tensor  # [T]
    local_target: Tensor  # [T], 0 where the target is elsewhere
    is_here: Tensor  # [T]
    steepness: Tensor | None = None  # [T, V], derivative of the capped logits


def _cap_(logits: Tensor, softcap: float) -> Tensor | None:
    """Cap logits in place and return the derivative of the cap; ``None`` without a cap."""
    if not softcap:
        return None
    steepness = logits.div_(softcap).tanh_().square().neg_().add_(1)
    logits.mul_(softcap)
    return steepness


def _losses_(logits: Tensor, labels: Tensor, part: VocabSlice, rule: _Rule) -> _Chunk:
    """Per-token losses of fp32 logits ``[T, V]``, which are overwritten, and labels ``[T]``, all real token ids."""
    smoothing, steepness = rule.smoothing, _cap_(logits, rule.softcap)
    local = labels - part.first
    here = (local >= 0) & (local < part.size)
    local = local.masked_fill(~here, 0)
    if part.size:
        own_peak = peak = logits.amax(-1)
        target = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0.0)
        mass = logits.sum(-1) if smoothing else torch.zeros_like(peak)
        total = logits.sub_(peak.unsqueeze(-1)).exp_().sum(-1)
    else:
        own_peak = peak = torch.full(labels.shape, float("-inf"), device=logits.device)
        total = target = mass = torch.zeros(labels.shape, device=logits.device)
    if part.axis.size > 1:
        peaks, totals, targets, masses = all_gather(torch.stack((peak, total, target, mass))[None], part.axis).unbind(1)
        peak = peaks.amax(0)
        total = (totals * (peaks - peak).exp()).sum(0)
        target, mass = targets.sum(0), masses.sum(0)
    # Subtract the target from the peak first: two large logits cancel exactly, and the small rest keeps its digits.
    log_sum_exp, loss = peak + total.log(), (peak - target) + total.log()
    if smoothing:
        # torch's definition: the target is (1 - s) one-hot + s / V, over the true vocabulary and not a rank's slice.
        loss = (1 - smoothing) * loss + smoothing * (log_sum_exp - mass / part.total)
    return _Chunk(logits, own_peak, log_sum_exp, loss, local, here, steepness)


def _gradient_(chunk: _Chunk, scale: Tensor, part: VocabSlice, smoothing: float) -> Tensor:
    """``scale x d loss / d logits``, ``[T, V]``, computed in place of the exponentials in one pass."""
    to_probability = (chunk.peak - chunk.log_sum_exp).exp_()
    grad = chunk.exps.mul_((to_probability * scale).unsqueeze(-1))
    if smoothing:
        grad.sub_((scale * (smoothing / part.total)).unsqueeze(-1))
    if part.size:
        hit = chunk.is_here * scale * (smoothing - 1)
        grad.scatter_add_(-1, chunk.local_target.unsqueeze(-1), hit.unsqueeze(-1))
    return grad if chunk.steepness is None else grad.mul_(chunk.steepness)


def _chunk_length(tokens: int, dtype: torch.dtype, padded_rows: int, chunk_bytes: int) -> int:
    """Tokens of a chunk whose fp32 logits take about ``chunk_bytes``.

    Ranks communicate once per chunk, so all need equal chunks: the length follows from the padded slice, equal on all.
    """
    length = max(1, chunk_bytes // (4 * padded_rows))
    if dtype != torch.float32:
        # Each chunk rounds the weight's gradient once more: 64 chunks lose 5 times what one does, 8 chunks 2 times.
        length = max(length, -(-tokens // _MOST_16_BIT_CHUNKS))
    return length


def _softmax_(
    logits: Tensor, labels: Tensor, weights: Tensor, scales: Tensor | None, part: VocabSlice, rule: _Rule
) -> Tensor:
    """Sum of the weighted losses of logits ``[T, V]``, and their gradient in their place, scaled by ``scales``.

    Ranks that share the vocabulary communicate once. On one rank, a CPU processes a few rows at a time: all passes over
    the logits but the first find them in its caches, and only these rows of 16-bit logits have an fp32 copy.
    """
    loss = torch.zeros((), dtype=torch.float32, device=logits.device)
    # torch.compile fuses the passes, and cannot trace the number of threads.
    cache = None if torch.compiler.is_compiling() else cache_bytes(logits.device)
    unit = logits.shape[0]
    if part.axis.size == 1 and cache is not None:
        unit = max(1, cache // (4 * logits.shape[1]))
    for some in _chunks(logits.shape[0], unit):
        own = logits[some]
        chunk = _losses_(own.float(), labels[some], part, rule)
        loss += chunk.loss.dot(weights[some])
        if scales is not None:
            grad = _gradient_(chunk, scales[some], part, rule.smoothing)
            if grad.dtype != own.dtype:
                own.copy_(grad)
    return loss


def _softmax_to_compile_(
    logits: Tensor,
    labels: Tensor,
    weights: Tensor,
    scales: Tensor | None,
    vocab_size: int,
    smoothing: float,
    softcap: float,
) -> Tensor:
    """:func:`_softmax_` on one rank, without writes between passes, which would keep a compiler from joining them."""
    wide, steepness = logits.float(), None
    if softcap:
        capped = (wide / softcap).tanh()
        wide, steepness = capped * softcap, 1 - capped.square()
    peak, at_label = wide.amax(-1), labels.unsqueeze(-1)
    log_total = (wide - peak.unsqueeze(-1)).exp().sum(-1).log()
    loss = (peak - wide.gather(-1, at_label).squeeze(-1)) + log_total
    if smoothing:
        loss = (1 - smoothing) * loss + smoothing * (peak + log_total - wide.sum(-1) / vocab_size)
    if scales is not None:
        is_label = torch.arange(logits.shape[1], device=logits.device) == at_label
        grad = (wide - (peak + log_total).unsqueeze(-1)).exp() - (1 - smoothing) * is_label - smoothing / vocab_size
        grad = grad * scales.unsqueeze(-1)
        logits.copy_(grad if steepness is None else grad * steepness)
    return loss.dot(weights)


@cache
def _compiled_softmax(backend: str) -> Callable[..., Tensor]:
    return torch.compile(_softmax_to_compile_, backend=backend)


def _softmax_by(backend: str | None, part: VocabSlice, rule: _Rule) -> Callable[..., Tensor]:
    """Function of the first four arguments of :func:`_softmax_`, compiled if there is a backend and one rank."""
    if part.axis.size > 1:
        return partial(_softmax_, part=part, rule=rule)
    if backend is None:
        return partial(by_shape(_softmax_), part=part, rule=rule)
    given = {"vocab_size": part.total, "smoothing": rule.smoothing, "softcap": rule.softcap}
    return partial(_compiled_softmax(backend), **given)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        weights: Tensor,
        part: VocabSlice,
        rule: _Rule,
        chunk_bytes: int,
        store: WeightGradStore | None,
        backend: str | None,
    ) -> Tensor:
        rows = weight[: part.size]
        # If products are computed in fp32, logits and gradients stay fp32 until they are returned.
        wide = upcasts(hidden, weight.t())
        multiply, dtype = ((product, weight.dtype), (matmul_fp32, torch.float32))[wide]
        wants_dx, wants_dw, wants_db = ctx.needs_input_grad[:3]
        wants_any = any((wants_dx, wants_dw, wants_db))
        d_hidden = torch.empty_like(hidden) if wants_dx else None
        d_weight = torch.empty_like(weight, dtype=dtype) if wants_dw else None
        if d_weight is not None:
            d_weight[part.size if hidden.shape[0] else 0 :].zero_()
        d_bias = weights.new_zeros(weight.shape[0]) if wants_db else None
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        scales, ctx.unit, ctx.headroom = _gradient_scales(weights, hidden.dtype)
        step = _chunk_length(hidden.shape[0], weight.dtype, weight.shape[0], chunk_bytes)
        softmax_ = _softmax_by(backend, part, rule)
        for start in range(0, hidden.shape[0], step):
            some = slice(start, start + step)
            x = hidden[some].to(dtype)
            grad = multiply(x, rows.t())
            if bias is not None:
                grad += bias[: part.size]
            # Not in place: `as_result` of device/execution.py says why.
            loss = loss + softmax_(grad, labels[some], weights[some], scales[some] if wants_any else None)
            if d_hidden is not None:
                d_hidden[some] = multiply(grad, rows)
            if d_weight is not None:
                # beta 0 on the first chunk: uninitialized memory is not read.
                d_weight[: part.size].addmm_(grad.t(), x, beta=1 if start else 0, alpha=1 / ctx.headroom)
            if d_bias is not None:
                d_bias[: part.size] += grad.sum(0, dtype=torch.float32)
            del grad  # free it before the next chunk's logits are allocated
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.weight, ctx.store = weight, store
        ctx.bias_dtype = None if bias is None else bias.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight, d_bias = ctx.saved_tensors
        if ctx.unit is not None:
            grad = grad * ctx.unit
        place = ctx.store.place_of(ctx.weight) if d_weight is not None and ctx.store is not None else None
        if place is not None:
            add_(place, d_weight, grad * ctx.headroom)
            d_weight = None
        if d_bias is not None:
            d_bias = _scaled_(d_bias, grad).to(ctx.bias_dtype)  # type: ignore[union-attr]  # it is not None
        return _scaled_(d_hidden, grad), _scaled_(d_weight, grad * ctx.headroom), d_bias, *(None,) * 7


def _gradient_scales(weights: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, float]:
    """Factors of the gradients: per token in forward; in backward a unit, and the headroom of the weight's gradient.

    The loss scale of fp16 is applied only in backward. Until then gradients of a mean over thousands of tokens would
    underflow, so tokens weigh about 1 each there. Their sum over tokens, for the weight, must not overflow.
    """
    if dtype != torch.float16:
        return weights, None, 1.0
    unit = weights.abs().amax().clamp_min(torch.finfo(torch.float32).tiny)
    return weights / unit, unit, _FP16_HEADROOM


def _scaled_(gradient: Tensor | None, scale: Tensor) -> Tensor | None:
    """``gradient x scale``, in place, since the gradient belongs to the autograd node and is used once."""
    if gradient is None:
        return None
    # An accelerator would first round a scalar tensor to the gradient's dtype: 1/3 in bf16 is off by 0.2 %.
    return gradient.mul_(scale if scale.is_cpu else scale.reshape(1))


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor,
    axis: Axis,
    vocab_size: int,
    *,
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    weight_grads: WeightGradStore | None = None,
    backend: str | None = None,
) -> Tensor:
    """``sum_t w_t cross_entropy(hidden_t W^T + b, label_t)`` without ever holding all logits.

    The gradients are computed in the forward pass, chunk by chunk, together with the logits; the token weights must
    therefore be known (a mask divided by the number of tokens, for a mean).

    Args:
        hidden: ``[..., H]``, equal on all ranks of the axis; its gradient is this rank's part of a sum over them.
        weight: ``[V/R, H]``, this rank's rows (they may end in padding).
        labels: ``[...]`` token ids; where the weight is 0, any value.
        token_weights: ``[...]`` fp32.
        axis: ranks that share the vocabulary.
        vocab_size: true size of the vocabulary.
        label_smoothing: share of the target's probability, as in ``torch.nn.functional.cross_entropy``.
        softcap: bound ``c`` of the logits, ``c tanh(logit / c)``; 0 for none.
        bias: ``[V/R]``, added to the logits, sharded like the weight; ``None`` for none.
        chunk_bytes: approximate size of the fp32 logits of one chunk; larger for 16-bit weights, if there were more
            than 8 chunks.
        weight_grads: store that knows the place of the weight's accumulated gradient; ``None`` to leave it to autograd.
        backend: backend of ``torch.compile`` for the passes over a chunk's logits, if this rank has all of them;
            ``None`` to run operation by operation.

    Returns:
        A scalar, fp32, equal on all ranks of the axis.
    """
    part = VocabSlice.of(axis, weight.shape[0], vocab_size)
    weights = token_weights.flatten().float()
    targets = labels.flatten().masked_fill(weights == 0, 0)
    rule = _Rule(label_smoothing, softcap)
    kind = hidden.device.type
    # Autocast is on under stock Lightning strategies, where products run in a 16-bit dtype.
    is_cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    hidden = hidden.to(weight.dtype) if is_cast else hidden
    with torch.autocast(kind, enabled=False) if is_cast else nullcontext():
        loss: Tensor = _LinearCrossEntropy.apply(
            hidden.flatten(0, -2), weight, bias, targets, weights, part, rule, chunk_bytes, weight_grads, backend
        )
    return loss


class _LinearTokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        kept: Tensor,
        part: VocabSlice,
        rule: _Rule,
        chunk_bytes: int,
    ) -> Tensor:
        ctx.step = _chunk_length(hidden.shape[0], weight.dtype, weight.shape[0], chunk_bytes)
        ctx.part, ctx.rule = part, rule
        losses = torch.empty(labels.shape, dtype=torch.float32, device=hidden.device)
        log_sum_exp = torch.empty_like(losses)
        for some in _chunks(hidden.shape[0], ctx.step):
            logits, _, _ = _chunk_logits(hidden[some], weight, part)
            chunk = _losses_(logits, labels[some], part, rule)
            losses[some], log_sum_exp[some] = chunk.loss, chunk.log_sum_exp
        ctx.save_for_backward(hidden, weight, labels, kept, log_sum_exp)
        return losses * kept

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None]:
        hidden, weight, labels, kept, log_sum_exp = ctx.saved_tensors
        part, scales = ctx.part, grad * kept
        wants_dx, wants_dw = ctx.needs_input_grad[:2]
        d_hidden = torch.empty_like(hidden) if wants_dx else None
        d_weight: Tensor | None = None
        for some in _chunks(hidden.shape[0], ctx.step):
            logits, x, multiply = _chunk_logits(hidden[some], weight, part)
            local = labels[some] - part.first
            here = (local >= 0) & (local < part.size)
            total, steepness = log_sum_exp[some], _cap_(logits, ctx.rule.softcap)
            exps = logits.sub_(total.unsqueeze(-1)).exp_()
            chunk = _Chunk(exps, total, total, total, local.masked_fill(~here, 0), here, steepness)
            d_logits = _gradient_(chunk, scales[some], part, ctx.rule.smoothing).to(x.dtype)
            if d_hidden is not None:
                d_hidden[some] = multiply(d_logits, weight[: part.size])
            if wants_dw:
                d_weight = torch.zeros_like(weight, dtype=x.dtype) if d_weight is None else d_weight
                d_weight[: part.size].addmm_(d_logits.t(), x)
        if wants_dw and d_weight is None:
            d_weight = torch.zeros_like(weight)
        return d_hidden, d_weight, None, None, None, None, None


def _chunks(tokens: int, step: int) -> list[slice]:
    return [slice(start, start + step) for start in range(0, tokens, step)]


def _chunk_logits(hidden: Tensor, weight: Tensor, part: VocabSlice) -> tuple[Tensor, Tensor, _Multiply]:
    """Fp32 logits ``[T, V]`` of a chunk, the chunk in the dtype of the product, and the function that multiplies."""
    wide = upcasts(hidden, weight.t())
    multiply, dtype = (matmul_fp32, torch.float32) if wide else (product, weight.dtype)
    x = hidden.to(dtype)
    return multiply(x, weight[: part.size].t()).float(), x, multiply


def linear_token_losses(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    axis: Axis,
    vocab_size: int,
    *,
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    ignore_index: int = IGNORE_INDEX,
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """``cross_entropy(hidden_t W^T, label_t)`` of every token, without ever holding all logits.

    The weights of tokens are known only in the backward pass, so the logits are computed twice: for the losses, and for
    their gradients. A mean whose weights are known costs less with :func:`linear_cross_entropy`.

    Arguments are as of that function; ``ignore_index`` is the label whose loss and gradient are zero.

    Returns:
        ``[...]`` fp32, equal on all ranks of the axis.
    """
    part = VocabSlice.of(axis, weight.shape[0], vocab_size)
    targets = labels.flatten()
    kept = targets != ignore_index
    rule = _Rule(label_smoothing, softcap)
    losses: Tensor = _LinearTokenLosses.apply(
        hidden.flatten(0, -2), weight, targets * kept, kept, part, rule, chunk_bytes
    )
    return losses.view(labels.shape)
