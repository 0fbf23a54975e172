"""Scaled dot-product attention in one op."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from habana_frameworks.torch import hpu


def _grouped(q: Tensor, k: Tensor) -> bool:
    return q.dim() == 4 and k.shape[1] not in (1, q.shape[1])


def _split_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Heads that share a key get a dimension of their own: ``[B, G, R, S, D]`` beside ``[B, G, 1, S, D]``."""
    groups, heads = k.shape[1], q.shape[1]
    if mask is not None:
        assert mask.dim() == 4, "the mask must have 4 dimensions where heads share keys"
        mask = mask.unsqueeze(1) if mask.shape[1] == 1 else mask.unflatten(1, (groups, heads // groups))
    return q.unflatten(1, (groups, heads // groups)), k.unsqueeze(2), v.unsqueeze(2), mask


class _Call(NamedTuple):
    """Options of a call, some of which exclude each other."""

    training: bool
    recompute: bool
    is_causal: bool
    has_mask: bool
    has_lengths: bool
    softmax_mode: str
    dtype: torch.dtype
    returns_dropout_mask: bool
    returns_probs: bool


_REFUSED: tuple[tuple[Callable[[_Call], bool], str], ...] = (
    (lambda c: c.is_causal and c.has_mask, "use_attn_mask and is_causal can not be True at the same time"),
    (lambda c: c.training and c.returns_probs, "return_attn_probs is supported only for inference mode"),
    (
        lambda c: c.recompute and c.returns_dropout_mask,
        "Return_dropout_mask is not supported in recompute mode",
    ),
    (
        lambda c: c.recompute and c.softmax_mode == "fast" and c.training and not c.is_causal,
        "Optimized softmax mode is supported in recompute training mode only in causal(triangular) mask case",
    ),
    (
        lambda c: c.has_lengths and (c.training or not c.is_causal),
        "Valid sequence length is supported only in inference with is_causal(triangular) mask case",
    ),
    (
        lambda c: c.softmax_mode == "fp32" and (c.training or c.dtype != torch.bfloat16),
        "softmax_mode = fp32 is supported only for inference mode and when q/k/v inputs are BF16",
    ),
)


class FusedSDPA(torch.autograd.Function):
    """``FusedSDPA.apply(q, k, v, ...)``, by position: tensors ``[B, heads, S, D]``, or without the first dimension."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "None",
        recompute_mode: bool | None = None,
        valid_seq_len: Tensor | None = None,
        seq_padding_type: str = "left",
        return_dropout_mask: bool = False,
        return_attn_probs: bool = False,
    ) -> Tensor:
        """Attention; which op is used depends on whether a gradient is wanted and probabilities are kept."""
        training = q.requires_grad or k.requires_grad or v.requires_grad
        recompute = hpu.recompute_sdp_enabled() if recompute_mode is None else recompute_mode
        call = _Call(
            training=training,
            recompute=recompute,
            is_causal=is_causal,
            has_mask=attn_mask is not None,
            has_lengths=valid_seq_len is not None,
            softmax_mode=softmax_mode,
            dtype=q.dtype,
            returns_dropout_mask=return_dropout_mask,
            returns_probs=return_attn_probs,
        )
        for is_refused, text in _REFUSED:
            assert not is_refused(call), text
        if return_attn_probs or return_dropout_mask:
            raise NotImplementedError("probabilities and dropout masks are not returned by the simulation")

        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        shapes = q.shape, k.shape, v.shape
        if _grouped(q, k):
            q, k, v, attn_mask = _split_heads(q, k, v, attn_mask)
        if recompute:
            out, *kept = torch.ops.hpu.sdpa_recomp_fwd(
                q, k, v, attn_mask, dropout_p, scale, is_causal, training, softmax_mode, valid_seq_len, seq_padding_type
            )
        else:
            out, *kept = torch.ops.hpu.sdpa_fwd(
                q, k, v, attn_mask, dropout_p, scale, is_causal, softmax_mode, valid_seq_len, seq_padding_type
            )
        if training:
            ctx.save_for_backward(q, k, v, attn_mask, out, *kept)
            ctx.options = dropout_p, scale, is_causal, softmax_mode, recompute, shapes
        return out.reshape(*shapes[0][:-1], shapes[2][-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k and v."""
        q, k, v, mask, out, *kept = ctx.saved_tensors
        p, scale, is_causal, softmax_mode, recompute, shapes = ctx.options
        grad = grad.reshape(out.shape)
        if recompute:
            grads = torch.ops.hpu.sdpa_recomp_bwd(grad, q, k, v, mask, *kept, is_causal, p, scale, softmax_mode, out)
        else:
            grads = torch.ops.hpu.sdpa_bwd(grad, q, k, v, *kept, is_causal, p, scale, out)
        return *(g.reshape(shape) for g, shape in zip(grads, shapes, strict=True)), *[None] * 10
