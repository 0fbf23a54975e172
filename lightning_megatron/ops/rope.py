"""Rotary position embedding (https://arxiv.org/abs/2104.09864) in the rotate-half form that LLaMA weights use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x`` in plain torch: the meaning of :func:`rope`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class _Rope(torch.autograd.Function):
    """A rotation's gradient is the rotation by the opposite angle: nothing but the angles is kept for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = cos[..., :half], sin[..., :half]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    return out


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs ``(i, i + D/2)`` of the last dimension by the position's angles.

    Args:
        x: ``[S, B, N, D]``.
        cos: ``[S, 1, 1, D]``, both halves alike, in the dtype of ``x``.
        sin: like ``cos``.

    Returns:
        ``[S, B, N, D]``.
    """
    if torch.compiler.is_compiling():  # the compiler saves the passes by itself, and knows no `out=` of a slice
        return rope_reference(x, cos, sin)
    out: Tensor = _Rope.apply(x, cos, sin)
    return out
