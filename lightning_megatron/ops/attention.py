"""Core attention: softmax(q k^T) v for the heads of one rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.ops.dropout import dropout as drop
from lightning_megatron.ops.hpu_bridge import bridge, requires
from lightning_megatron.ops.implementation import Function, Implementation, Op
from lightning_megatron.ops.matmul import upcasts


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, dropout: float = 0.0, first_query: int = 0
) -> Tensor:
    """Attention in plain torch, softmax in fp32: the definition of :func:`attention`."""
    repeats = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(repeats, dim=2), v.repeat_interleave(repeats, dim=2)
    scores = torch.einsum("sbnd,tbnd->bnst", q, k).float() / math.sqrt(q.shape[-1])
    if causal:
        queries = torch.arange(q.shape[0], device=q.device) + first_query
        hidden = torch.arange(k.shape[0], device=q.device)[None, :] > queries[:, None]
        scores = scores.masked_fill(hidden, float("-inf"))
    weights = F.dropout(scores.softmax(-1), dropout)
    return torch.einsum("bnst,tbnd->sbnd", weights.to(v.dtype), v)


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, dropout: float = 0.0, first_query: int = 0) -> Tensor:
    """Scaled dot-product attention with grouped key/value heads (https://arxiv.org/abs/2305.13245).

    Args:
        q: ``[S, B, N, D]``.
        k: ``[T, B, G, D]``, ``N`` a multiple of ``G``; head ``n`` of ``q`` reads head ``n // (N / G)``.
        v: ``[T, B, G, D]``.
        causal: True if position ``i`` sees only positions up to ``i``.
        dropout: probability of dropping an attention weight.
        first_query: position of the first query among the keys (decoding with a cache).

    Returns:
        ``[S, B, N, D]``.
    """
    out: Tensor = ATTENTION.on(q.device.type)(q, k, v, causal=causal, dropout=dropout, first_query=first_query)
    return out


def attention_torch(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, dropout: float = 0.0, first_query: int = 0
) -> Tensor:
    """:func:`attention` by torch's choice of kernel."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    mask = None
    if causal and first_query and q.shape[2] > 1:
        # torch's causal flag aligns the first query with the first key; later queries need a mask.
        mask = _past(q, k, first_query)
    plain_causal = causal and first_query == 0 and q.shape[2] > 1
    if dropout and q.device.type == "cpu":
        return _op_by_op(q, k, v, _past(q, k) if plain_causal else mask, dropout).permute(2, 0, 1, 3)
    fused: Callable[..., Tensor] = _WideAttention.apply if upcasts(q, k.mT) else _fused
    return fused(q, k, v, mask, plain_causal, dropout).permute(2, 0, 1, 3)


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout: float) -> Tensor:
    """torch's choice of kernel, ``[B, N, S, D]``."""
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
    )


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


def _op_by_op(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, dropout: float) -> Tensor:
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
    out = drop(scores.softmax(-1), dropout).matmul(v)
    return out.unflatten(2, (-1, queries)).flatten(1, 2)


MAX_HEAD_DIM = 128
"""Largest head dimension of the Gaudi's kernel."""


def attention_hpu(
    kernel: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    dropout: float = 0.0,
    first_query: int = 0,
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
        causal: True if position ``i`` sees only positions up to ``i``.
        dropout: probability of dropping an attention weight.
        first_query: position of the first query among the keys; must be 0.
        recompute: True to save a row's maximum and sum for backward instead of its weights
            (https://arxiv.org/abs/2205.14135).
        softmax_mode: ``"None"``, or ``"fast"``, which is less exact.
    """
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    if k.shape[1] == 1:  # the kernel groups heads by itself, but not around a single one
        k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
    out: Tensor = kernel.apply(q, k, v, None, dropout, causal, None, softmax_mode, recompute)
    return out.permute(2, 0, 1, 3)


def _beyond_sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, dropout: float = 0.0, first_query: int = 0
) -> str | None:
    if q.shape[-1] > MAX_HEAD_DIM:
        return f"a head of {q.shape[-1]}, and the kernel takes {MAX_HEAD_DIM}"
    if q.dtype not in (torch.bfloat16, torch.float32, torch.float16):
        return f"{q.dtype}"
    if causal and q.shape[0] != k.shape[0]:
        return "decoding with a cache: queries begin later than keys"
    return None


def _beyond_fast_softmax(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **more: Any) -> str | None:
    return _beyond_sdpa(q, k, v, causal=causal, **more) if causal else "recomputation with the fast softmax is causal"


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
    )


ATTENTION = Op(
    "attention",
    (
        Implementation("torch's kernel", "cpu", lambda: attention_torch),
        Implementation("torch's kernel", "cuda", lambda: attention_torch),
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
        Implementation("torch", None, lambda: attention_torch),
    ),
    run=attention,
    reference=attention_reference,
)
