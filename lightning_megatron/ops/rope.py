"""Rotary position embedding (https://arxiv.org/abs/2104.09864) in the rotate-half form that LLaMA weights use."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.device.hpu_bridge import bridge, requires
from lightning_megatron.ops.implementation import Function, Implementation, Op


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """:func:`rope` in plain torch."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class _Rope(torch.autograd.Function):
    """A rotation's gradient is the rotation by the opposite angle: only the angles are saved."""

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


def rope_torch(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """:func:`rope` in few passes over memory, saving only the angles."""
    if torch.compiler.is_compiling():  # the compiler fuses the passes, and does not support `out=` of a slice
        return rope_reference(x, cos, sin)
    out: Tensor = _Rope.apply(x, cos, sin)
    return out


def rope_hpu(kernel: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """:func:`rope` by Intel's ``RotaryPosEmbeddingHelperV1``, the one with gradients; never run on a real Gaudi."""
    out: Tensor = kernel.apply(x, cos, sin, 0)
    return out


def _beyond_helper(x: Tensor, cos: Tensor, sin: Tensor) -> str | None:
    if cos.shape[1] != 1:
        return "every sequence has positions of its own"
    return None if cos.dtype == x.dtype else f"angles in {cos.dtype} for {x.dtype}"


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs ``(i, i + D/2)`` of the last dimension by the position's angles.

    Args:
        x: ``[S, B, N, D]``.
        cos: ``[S, 1 or B, 1, D]``, both halves alike, in the dtype of ``x``.
        sin: ``[S, 1 or B, 1, D]``, as ``cos``.

    Returns:
        ``[S, B, N, D]``.
    """
    out: Tensor = ROPE.on(x.device.type)(x, cos, sin)
    return out


_HELPER = "hpex.kernels", "RotaryPosEmbeddingHelperV1"
ROPE: Op[Function] = Op(
    "rope",
    (
        Implementation(
            _HELPER[1], "hpu", lambda: partial(rope_hpu, bridge(*_HELPER)), requires(*_HELPER), _beyond_helper
        ),
        Implementation("few passes", None, lambda: rope_torch),
    ),
    run=rope,
    reference=rope_reference,
)
