"""One matrix product a group of rows, each with a weight of its own: what the experts of a rank compute."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.ops.implementation import Op, Version
from lightning_megatron.ops.matmul import matmul_into, widens


class _GroupedLinear(torch.autograd.Function):
    """Writes each group's product where it belongs: no gradient as long as all weights is made once a group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        out = x.new_empty(x.shape[0], weight.shape[1])
        for rows, w, product in zip(x.split(counts), weight, out.split(counts), strict=True):
            matmul_into(product, rows, w.t())
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        counts, grad = ctx.counts, grad.contiguous()
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x, memory_format=torch.contiguous_format)
            for dy, w, product in zip(grad.split(counts), weight, dx.split(counts), strict=True):
                matmul_into(product, dy, w)
        if ctx.needs_input_grad[1]:
            dw = torch.empty_like(weight, memory_format=torch.contiguous_format)
            for dy, rows, product in zip(grad.split(counts), x.split(counts), dw, strict=True):
                matmul_into(product, dy.t(), rows)  # of no rows: zeros
        return dx, dw, None


def grouped_linear_reference(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """The meaning of :func:`grouped_linear` in plain torch."""
    return torch.cat([rows @ w.t() for rows, w in zip(x.split(list(counts)), weight, strict=True)])


def grouped_linear(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """``x_g W_g^T`` for every group ``g`` of consecutive rows.

    Args:
        x: ``[n, in]``, the groups end to end; a group may be empty, and so may be all.
        weight: ``[G, out, in]``.
        counts: rows of each group, on the host: nothing waits for the device.

    Returns:
        ``[n, out]``.
    """
    out: Tensor = GROUPED_LINEAR.on(x.device.type)(x, weight, counts)
    return out


def grouped_in_place(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """:func:`grouped_linear` with a product a group, each written where it belongs."""
    out: Tensor = _GroupedLinear.apply(x, weight, tuple(counts))
    return out


def grouped_product(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """:func:`grouped_linear` by torch's kernel, which multiplies all groups at once; never run on a GPU."""
    ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=x.device)
    return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)


def _beyond_kernel(x: Tensor, weight: Tensor, counts: Sequence[int]) -> str | None:
    if not x.dtype == weight.dtype == torch.bfloat16:
        return "the kernel is for bf16"
    if any(size % 8 for size in weight.shape[1:]):
        return "rows are no multiples of 16 bytes"
    return None if x.shape[0] else "no tokens"


def _no_kernel() -> str | None:
    return None if hasattr(F, "grouped_mm") else "torch has it from 2.10 on"


GROUPED_LINEAR = Op(
    "grouped_linear",
    grouped_linear,
    grouped_linear_reference,
    (
        Version("torch's grouped_mm", "cuda", lambda: grouped_product, _no_kernel, _beyond_kernel),
        Version("a product a group", None, lambda: grouped_in_place),
    ),
)


def batched_linear(x: Tensor, weight: Tensor) -> Tensor:
    """:func:`grouped_linear` of groups of one length, ``[G, n, in] -> [G, n, out]``: one product where that is best."""
    transposed = weight.transpose(1, 2)
    if not widens(x, transposed):
        return torch.bmm(x, transposed)
    # Group by group, only one weight at a time has a wide copy.
    groups, rows, _ = x.shape
    return grouped_linear(x.flatten(0, 1), weight, [rows] * groups).unflatten(0, (groups, rows))
