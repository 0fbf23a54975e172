"""Core attention: softmax(q k^T) v for the heads of one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.device.hpu_bridge import bridge, requires
from lightning_megatron.documents import attend_documents
from lightning_megatron.ops.blockwise_attention import BLOCKWISE, WITH_SUM
from lightning_megatron.ops.core.attention_call import AttentionCall
from lightning_megatron.ops.cpu.attention_blocks import attention_blocks, takes
from lightning_megatron.ops.dropout import dropout as drop
from lightning_megatron.ops.flash.kernel_order import kernels_for
from lightning_megatron.ops.flash.varlen_attention import beyond_varlen, lacks_varlen, varlen_documents
from lightning_megatron.ops.implementation import Fallback, Function, Implementation, Op, OpChoice
from lightning_megatron.ops.matmul import upcasts


def attention_reference(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """Attention in plain torch, softmax in fp32: the definition of :func:`attention`."""
    rule = call.rule
    repeats = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(repeats, dim=2), v.repeat_interleave(repeats, dim=2)
    scores = torch.einsum("sbnd,tbnd->bnst", q, k).float() * rule.factor(q.shape[-1])
    if rule.softcap:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    queries = torch.arange(q.shape[0], device=q.device)[:, None] + call.first_query
    keys = torch.arange(k.shape[0], device=q.device)[None, :]
    if call.bias is not None:
        scores = scores + call.bias
    if rule.slopes:
        scores = scores + scores.new_tensor(rule.slopes)[:, None, None] * (keys - queries)
    if call.causal:
        scores = scores.masked_fill(keys > queries, float("-inf"))
    if rule.window:
        scores = scores.masked_fill(keys <= queries - rule.window, float("-inf"))
    if call.key_mask is not None:
        scores = _hide(scores, call.key_mask)
    if call.sinks is not None:
        scores = torch.cat((scores, call.sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)), dim=-1)
    weights = F.dropout(scores.softmax(-1)[..., : len(k)], call.dropout)
    return torch.einsum("bnst,tbnd->sbnd", weights.to(v.dtype), v)


def attention(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """Scaled dot-product attention with grouped key/value heads (https://arxiv.org/abs/2305.13245).

    Args:
        q: ``[S, B, N, D]``.
        k: ``[T, B, G, D]``, ``N`` a multiple of ``G``; head ``n`` of ``q`` reads head ``n // (N / G)``.
        v: ``[T, B, G, V]``, ``V`` any number of features.
        call: the computation, for whole sequences.

    Returns:
        ``[S, B, N, V]``.
    """
    out: Tensor = ATTENTION.on(q.device.type)(q, k, v, call)
    return out


def attention_torch(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """:func:`attention` by torch's choice of kernel."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    mask, dropout, key_mask = None, call.dropout, call.key_mask
    if call.causal and call.first_query and q.shape[2] > 1:
        # torch's causal flag aligns the first query with the first key; later queries need a mask.
        mask = _past(q, k, call.first_query)
    plain_causal = call.causal and call.first_query == 0 and q.shape[2] > 1
    if dropout and q.device.type == "cpu":
        return _op_by_op(q, k, v, _past(q, k) if plain_causal else mask, dropout, key_mask).permute(2, 0, 1, 3)
    if key_mask is not None:
        past, seen = _past(q, k) if plain_causal else mask, key_mask[:, None, None, :]
        # The mask has one row for all queries, unless they see different keys.
        mask, plain_causal = _added(seen if past is None else seen & past, q.dtype), False
    fused: Callable[..., Tensor] = _WideAttention.apply if upcasts(q, k.mT) else _fused
    return fused(q, k, v, mask, plain_causal, dropout).permute(2, 0, 1, 3)


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout: float) -> Tensor:
    """torch's choice of kernel, ``[B, N, S, D]``."""
    if mask is not None and mask.is_floating_point():
        mask = mask.to(q.dtype)
    features, more = v.shape[-1], q.shape[-1] - v.shape[-1]
    if q.device.type == "cpu" and more > 0 and q.shape[2] > 1:
        v = F.pad(v, (0, more))  # a CPU's fused kernel takes values of the keys' size: torch would make whole scores
    with kernels_for(q.device.type, masked=mask is not None):
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out[..., :features]


class _WideAttention(torch.autograd.Function):
    """Attention in fp32 on copies of bf16 operands (see ``ops/matmul.py``), without dropout.

    torch's kernel would save the fp32 copies, twice the memory. This saves the bf16 operands, and backward computes the
    forward again: together about half the time of the bf16 kernel.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout: float) -> Tensor:
        ctx.save_for_backward(q, k, v, mask)
        ctx.causal = causal
        return _fused(q.float(), k.float(), v.float(), mask, causal, dropout).to(q.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        *narrow, mask = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        wide = [x.detach().float().requires_grad_(needs) for x, needs in zip(narrow, needed, strict=True)]
        with torch.enable_grad():
            out = _fused(wide[0], wide[1], wide[2], mask, ctx.causal, 0.0)
        grads = iter(torch.autograd.grad(out, [x for x in wide if x.requires_grad], dy.float()))
        return *(next(grads).to(dy.dtype) if needs else None for needs in needed), None, None, None


def _past(q: Tensor, k: Tensor, first_query: int = 0) -> Tensor:
    """``[S, T]``: True for the keys that each query sees."""
    queries = torch.arange(q.shape[2], device=q.device) + first_query
    return torch.arange(k.shape[2], device=q.device)[None, :] <= queries[:, None]


def _hide(scores: Tensor, key_mask: Tensor) -> Tensor:
    """Scores ``[B, ..., T]`` with the lowest finite number at keys that ``[B, T]`` hides.

    Not minus infinity, so that weights are no NaN if all keys are hidden, as in a sample of padding only.
    """
    hidden = ~key_mask.unflatten(0, (-1, *(1,) * (scores.ndim - 2)))
    return scores.masked_fill(hidden, torch.finfo(scores.dtype).min)


def _added(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive mask: 0 for seen keys, the lowest finite number for others."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)


def _op_by_op(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, dropout: float, key_mask: Tensor | None = None
) -> Tensor:
    """Attention with dropout of its weights, ``[B, N, S, D]``.

    A CPU has no fused kernel for this, and torch's fallback saves twelve bytes per score, in fp32. This saves five, in
    16 bits: the softmax, its values after dropout, and a mask of one byte
    (https://arxiv.org/abs/2205.05198, section 4.1).
    """
    groups, queries = k.shape[1], q.shape[2]
    # Heads that share a key are rows of one matrix, so that keys are not copied: [B, G, N/G x S, D].
    below = q.unflatten(1, (groups, -1)).flatten(2, 3)
    scores = below.matmul(k.mT).mul_(q.shape[-1] ** -0.5)
    if seen is not None:
        scores.masked_fill_(~seen.repeat(scores.shape[2] // queries, 1), float("-inf"))
    if key_mask is not None:
        scores = _hide(scores, key_mask)
    out = drop(scores.softmax(-1), dropout).matmul(v)
    return out.unflatten(2, (-1, queries)).flatten(1, 2)


def attention_cpu(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """:func:`attention` in blocks of queries for short sequences, and by torch's kernel for all others."""
    if call.key_mask is not None or not takes(q, k, v, call.dropout):
        return attention_torch(q, k, v, call)
    first_query = call.first_query if call.causal else None
    if torch.compiler.is_compiling():
        from lightning_megatron.ops.cpu import graph_operators

        out: Tensor = graph_operators.attention_blocks(q, k, v, first_query)
        return out
    return attention_blocks(q, k, v, first_query)


def attention_with_bias(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """:func:`attention` by torch's choice of kernel, for scores with another scale or a bias."""
    dtype = q.dtype
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    if upcasts(q, k.mT):  # bf16 on a processor without arithmetic for it
        q, k, v = q.float(), k.float(), v.float()
    added = None if call.bias is None else call.bias.to(q.dtype)
    seen = _past(q, k, call.first_query) if call.causal else None
    if call.key_mask is not None:
        keys = call.key_mask[:, None, None, :]
        seen = keys if seen is None else keys & seen
    if seen is not None:
        lowest = torch.finfo(q.dtype).min
        added = _added(seen, q.dtype) if added is None else added.masked_fill(~seen, lowest)
    how: dict[str, Any] = {"attn_mask": added, "dropout_p": call.dropout, "scale": call.rule.factor(q.shape[-1])}
    with kernels_for(q.device.type, masked=added is not None):
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **how)
    return out.permute(2, 0, 1, 3).to(dtype)


def documents_by_length(core: Function, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """Causal attention inside of each document, by one call of ``core`` for all documents of a length."""
    assert call.causal
    assert call.documents is not None

    def attend(q: Tensor, k: Tensor, v: Tensor, first_query: int) -> Tensor:
        out: Tensor = core(q, k, v, call._replace(first_query=first_query, documents=None))
        return out

    return attend_documents(attend, q, k, v, call.documents, call.first_query, call.sinks)


@torch.compiler.disable  # as attend_documents itself
def _by_length(choice: OpChoice[Function], q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    choice.fallbacks.setdefault("packed documents", "a call for each length")
    with kernels_for(q.device.type, varied=True):
        return documents_by_length(choice.run, q, k, v, call)


def _at_once(choice: OpChoice[Function], q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    choice.fallbacks.setdefault("packed documents", "varlen_attn")
    return varlen_documents(q, k, v, call)


def document_attention(choice: OpChoice[Function], device: str | None, mode: str) -> Function:
    """Attention inside of documents, by one kernel where the device has one for it, and by ``choice`` elsewhere."""
    by_length, at_once = partial(_by_length, choice), partial(_at_once, choice)
    if device != "cuda" or mode == "off" or lacks_varlen():
        return by_length
    how: dict[str, Any] = {"otherwise": by_length, "otherwise_name": "a call for each length", "mode": "auto"}
    return Fallback(op="attention", preferred=at_once, unsupported=beyond_varlen, noted=choice.fallbacks, **how)


MAX_HEAD_DIM = 128
"""Largest head dimension of the Gaudi's kernel."""


def attention_hpu(
    kernel: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: AttentionCall,
    *,
    recompute: bool = True,
    softmax_mode: str = "None",
) -> Tensor:
    """:func:`attention` by Intel's ``FusedSDPA``; never run on a real Gaudi.

    Args:
        kernel: Intel's autograd function. It takes arguments by position only, and a mask or the causal flag, never
            both; its causal flag aligns the corners at the first key.
        q: ``[S, B, N, D]``.
        k: ``[T, B, G, D]``.
        v: ``[T, B, G, D]``.
        call: causal or not, with dropout or not, and no more.
        recompute: True to save each query's maximum and sum for backward instead of its weights
            (https://arxiv.org/abs/2205.14135).
        softmax_mode: ``"None"``, or ``"fast"``, which is less exact.
    """
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    if k.shape[1] == 1:  # the kernel supports grouped heads, but not a single key head
        k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
    out: Tensor = kernel.apply(q, k, v, None, call.dropout, call.causal, None, softmax_mode, recompute)
    return out.permute(2, 0, 1, 3)


def _beyond_plain(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> str | None:
    if call.bias is not None:
        return "a bias of the scores"
    return None if call.rule.is_plain(len(k)) else str(call.rule)


def _beyond_flags(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> str | None:
    if call.causal and call.first_query and len(q) > 1:
        return "queries that begin later than the keys"
    return _beyond_plain(q, k, v, call)


def _beyond_scaled(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> str | None:
    if call.causal and call.bias is None:  # blockwise attention is better: it needs no whole matrix of scores
        return str(call.rule)
    unscaled = replace(call.rule, scale=0.0)
    return None if unscaled.is_plain(len(k)) else str(unscaled)


def _beyond_sdpa(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> str | None:
    if q.shape[-1] > MAX_HEAD_DIM:
        return f"a head of {q.shape[-1]}, and the kernel takes {MAX_HEAD_DIM}"
    if v.shape[-1] != q.shape[-1]:
        return f"values of {v.shape[-1]} features, and keys of {q.shape[-1]}"
    if q.dtype not in (torch.bfloat16, torch.float32, torch.float16):
        return f"{q.dtype}"
    if call.causal and q.shape[0] != k.shape[0]:
        return "decoding with a cache: queries begin later than keys"
    if call.key_mask is not None:
        return "padding among the keys"
    return _beyond_plain(q, k, v, call)


def _beyond_fast_softmax(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> str | None:
    return _beyond_sdpa(q, k, v, call) if call.causal else "recomputation with the fast softmax is causal"


_FUSED_SDPA = "hpex.kernels", "FusedSDPA"


def _fused_sdpa(
    name: str, unsupported: Callable[..., str | None], variant: str | None = None, **options: Any
) -> Implementation[Function]:
    """A mode of Intel's kernel."""
    return Implementation(
        name,
        "hpu",
        lambda: partial(attention_hpu, bridge(*_FUSED_SDPA), **options),
        requires(*_FUSED_SDPA),
        unsupported,
        variant,
        recomputes=options.get("recompute", True),
    )


_TORCH = Implementation("torch", None, lambda: attention_torch, unsupported=_beyond_plain)
ATTENTION = Op(
    "attention",
    (
        Implementation("blocks of queries", "cpu", lambda: attention_cpu, unsupported=_beyond_plain),
        Implementation("torch's kernel", "cuda", lambda: attention_torch, unsupported=_beyond_flags),
        WITH_SUM,
        _fused_sdpa("FusedSDPA", _beyond_sdpa),
        _fused_sdpa("FusedSDPA, fast softmax", _beyond_fast_softmax, "fast_softmax", softmax_mode="fast"),
        _fused_sdpa("FusedSDPA, weights kept", _beyond_sdpa, "no_recompute", recompute=False),
        _fused_sdpa(
            "FusedSDPA, fast softmax, weights kept",
            _beyond_sdpa,
            "fast_softmax_no_recompute",
            softmax_mode="fast",
            recompute=False,
        ),
        _TORCH,
        # On Gaudi its kernel has no gradient for a bias.
        *(
            Implementation("torch, with a bias", device, lambda: attention_with_bias, unsupported=_beyond_scaled)
            for device in ("cpu", "cuda")
        ),
        BLOCKWISE,
    ),
    run=attention,
    reference=attention_reference,
)


def attention_in_parts(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """:func:`attention` without scores ``[S, T]``, for queries that begin later than the keys."""
    out: Tensor = IN_PARTS.on(q.device.type)(q, k, v, call)
    return out


_ANYWHERE: Op[Function] = Op("attention", (BLOCKWISE, _TORCH), run=attention_in_parts, reference=attention_reference)
IN_PARTS = replace(_ANYWHERE, implementations=(WITH_SUM, BLOCKWISE, _TORCH), reference=_ANYWHERE.choose("").run)
"""Attention of context-parallel ranks that gather all keys."""
