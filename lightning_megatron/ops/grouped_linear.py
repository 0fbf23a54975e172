"""One matrix product per group of rows, each group with its own weight: the computation of a rank's experts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.ops.implementation import Implementation, Op
from lightning_megatron.ops.matmul import matmul_into, upcasts


class _GroupedLinear(torch.autograd.Function):
    """Writes each group's product into one output. Slicing in autograd would make a gradient of full size per group."""

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
    """:func:`grouped_linear` in plain torch."""
    return torch.cat([rows @ w.t() for rows, w in zip(x.split(list(counts)), weight, strict=True)])


def grouped_linear(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """``x_g W_g^T`` for every group ``g`` of consecutive rows.

    Args:
        x: ``[n, in]``, the groups one after the other; groups may be empty.
        weight: ``[G, out, in]``.
        counts: number of rows of each group, on the host: nothing waits for the device.

    Returns:
        ``[n, out]``.
    """
    out: Tensor = GROUPED_LINEAR.on(x.device.type)(x, weight, counts)
    return out


def grouped_in_place(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """:func:`grouped_linear` with one product per group, each written into its rows of the output."""
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
    (
        Implementation("torch's grouped_mm", "cuda", lambda: grouped_product, _no_kernel, _beyond_kernel),
        Implementation("a product a group", None, lambda: grouped_in_place),
    ),
    run=grouped_linear,
    reference=grouped_linear_reference,
)


def batched_linear(x: Tensor, weight: Tensor) -> Tensor:
    """:func:`grouped_linear` of groups of equal length, ``[G, n, in] -> [G, n, out]``: one product where faster."""
    transposed = weight.transpose(1, 2)
    if not upcasts(x, transposed):
        return torch.bmm(x, transposed)
    # Group by group, so that only one weight at a time has an fp32 copy.
    groups, rows, _ = x.shape
    return grouped_linear(x.flatten(0, 1), weight, [rows] * groups).unflatten(0, (groups, rows))
