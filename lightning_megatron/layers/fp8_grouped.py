"""Products of groups of rows, each with its own weight, in fp8: the computation of a rank's experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.layers.fp8_linear import Cast, Fp8Gemms


def grouped_linear_fp8(x: Tensor, weight: Tensor, counts: Sequence[int], gemms: Fp8Gemms) -> Tensor:
    """``x_g W_g^T`` for every group ``g`` of consecutive rows, in fp8 where ``gemms`` can.

    Inputs, weights and gradients have one scale each for all groups, so that no scale depends on the layout.

    Args:
        x: ``[n, in]``, at least one row; the groups one after the other, groups may be empty.
        weight: ``[G, out, in]``.
        counts: number of rows of each group, on the host.
        gemms: products with the scales of this layer.

    Returns:
        ``[n, out]``.
    """
    gemms.prepare(weight)
    out: Tensor = _GroupedLinear.apply(x, weight, tuple(counts), gemms)
    return out


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: tuple[int, ...], gemms: Fp8Gemms) -> Tensor:
        rows, factors, scale, kept = gemms.operands(x, weight)
        ctx.save_for_backward(x, weight, *kept)
        ctx.counts, ctx.gemms = counts, gemms
        return _multiply(gemms, rows, factors.view_as(weight).transpose(1, 2), scale, counts)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *kept = ctx.saved_tensors
        gemms, dx, dw = ctx.gemms, None, None
        grad = gemms.gradient(dy.contiguous())
        if ctx.needs_input_grad[0]:
            factors, scale = gemms.backward_weight(weight, kept)
            dx = _multiply(gemms, grad, factors.view_as(weight), scale, ctx.counts)
        if ctx.needs_input_grad[1]:
            inputs = gemms.backward_input(x, kept)
            dw = torch.zeros_like(weight)
            for here, own, rows in zip(dw, *(_groups(cast, ctx.counts) for cast in (grad, inputs)), strict=True):
                if len(rows):
                    here.copy_(gemms.kernels.product(own.t(), rows, grad.scale, inputs.scale, None, dw.dtype))
        return dx, dw, None, None


def _multiply(gemms: Fp8Gemms, x: Cast, factors: Tensor, scale: Tensor, counts: Sequence[int]) -> Tensor:
    """``[n, k]`` and ``[G, k, m]`` to ``[n, m]``, the rows of each group times its matrix."""
    out = x.values.new_empty(x.values.shape[0], factors.shape[2], dtype=x.dtype)
    for here, rows, factor in zip(out.split(list(counts)), _groups(x, counts), factors, strict=True):
        if len(rows):
            here.copy_(gemms.kernels.product(rows, factor, x.scale, scale, None, x.dtype))
    return out


def _groups(cast: Cast, counts: Sequence[int]) -> Iterator[Tensor]:
    return iter(cast.values.split(list(counts)))
