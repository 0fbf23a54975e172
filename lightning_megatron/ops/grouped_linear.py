"""One matrix product per group of rows, each group with its own weight: the computation of a rank's experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.by_shape import by_shape
from lightning_megatron.ops.accumulate import add_product_
from lightning_megatron.ops.cpu.onednn import by_onednn
from lightning_megatron.ops.implementation import Implementation, Op
from lightning_megatron.ops.matmul import matmul_into, product, upcasts
from lightning_megatron.weight_grad_store import GradPlace

FindSum = Callable[[], GradPlace | None]
"""Function that a backward calls for the buffer to which it adds the weights' gradient; ``None``: return it."""

SHORTEST = 16
"""Smallest number of rows of a product whose kernel is built for its shape."""


def rounded_length(rows: int) -> int:
    """Round up to one of few lengths: multiples of 16, at most 16 of them between a power of two and the next."""
    step = max(SHORTEST, 1 << max(0, (rows - 1).bit_length() - 5))
    return -(-rows // step) * step


def builds_kernels(a: Tensor, b: Tensor) -> bool:
    """True if the library that computes ``a b`` builds and keeps a kernel for each number of rows.

    oneDNN does: a new number costs a millisecond and half a megabyte, more than a product of some hundred rows. And an
    expert's number of rows changes in every micro-batch. (In a graph of ``torch.compile``, the compiler chooses.)

    Args:
        a: ``[n, k]``.
        b: ``[k, m]``.
    """
    if a.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return by_onednn(a, b) or (a.dtype == b.dtype == torch.bfloat16 and not upcasts(a, b))


@by_shape
def _multiply(x: Tensor, factors: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """``[n, k]`` to ``[n, m]``, the rows of each group times its ``[k, m]`` matrix.

    A product of more rows than its group has writes into rows of later groups, which are computed after it.
    """
    out, start = x.new_empty(x.shape[0], factors[0].shape[1]), 0
    for rows, factor in zip(counts, factors, strict=True):
        own = x[start : start + rows]
        length = rounded_length(rows) if builds_kernels(own, factor) else rows
        if start + length <= x.shape[0]:
            matmul_into(out[start : start + length], x[start : start + length], factor)
        else:
            out[start : start + rows] = product(_lengthened(own, length), factor)[:rows]
        start += rows
    return out


def _lengthened(x: Tensor, length: int) -> Tensor:
    """``[n, k]`` followed by rows of zeros, ``[length, k]``."""
    return x if x.shape[0] == length else F.pad(x, (0, 0, 0, length - x.shape[0]))


def _factors(grad: Tensor, x: Tensor, counts: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """``[m, n_g], [n_g, k]`` of each group, whose product is the gradient of its weight."""
    for dy, rows in zip(grad.split(counts), x.split(counts), strict=True):
        length = rounded_length(len(rows)) if builds_kernels(dy.t(), rows) else len(rows)
        yield _lengthened(dy, length).t(), _lengthened(rows, length)


@by_shape
def _weight_gradients(grad: Tensor, x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """``[n, m], [n, k]`` to ``[G, m, k]``, the product of each group's rows."""
    dw = torch.empty_like(weight, memory_format=torch.contiguous_format)
    for here, (dy, rows) in zip(dw, _factors(grad, x, counts), strict=True):
        matmul_into(here, dy, rows)  # of no rows: zeros
    return dw


@by_shape
def _add_weight_gradients(total: Tensor, grad: Tensor, x: Tensor, counts: Sequence[int], is_new: bool) -> None:
    """Add them to a sum ``[G, m, k]``."""
    for here, (dy, rows) in zip(total, _factors(grad, x, counts), strict=True):
        if rows.shape[0]:
            add_product_(GradPlace(here, is_new), dy, rows)
        elif is_new:
            here.zero_()


class _GroupedLinear(torch.autograd.Function):
    """Writes each group's product into one output. Slices under autograd would have a full-size gradient per group."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, counts: Sequence[int], kernels: _Kernels, find_sum: FindSum | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts, ctx.kernels, ctx.find_sum = counts, kernels, find_sum
        ctx.groups = kernels.groups(x, counts)
        return kernels.multiply(x, weight.transpose(1, 2), ctx.groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        counts, grad, dx = ctx.counts, grad.contiguous(), None
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        if needs_dx:
            dx = ctx.kernels.multiply(grad, weight, ctx.groups)
        if not needs_dw:
            return dx, None, None, None, None
        place = None if ctx.find_sum is None else ctx.find_sum()
        if place is None:
            return dx, ctx.kernels.weight_gradients(grad, x, weight, ctx.groups), None, None, None
        _add_weight_gradients(place.grad.view_as(weight), grad, x, counts, place.is_new)
        return dx, None, None, None, None


class _GroupBias(torch.autograd.Function):
    """Adds one row to each group of rows; its gradient is the sum over the group, in the order of the rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, counts: Sequence[int]) -> Tensor:
        ctx.counts = counts
        return torch.cat([rows + own for rows, own in zip(x.split(counts), bias, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, torch.stack([rows.sum(0) for rows in grad.split(ctx.counts)]), None


def add_group_bias(x: Tensor, bias: Tensor, counts: Sequence[int]) -> Tensor:
    """``x_g + b_g`` for every group ``g`` of consecutive rows.

    Args:
        x: ``[n, out]``, the groups one after the other; groups may be empty.
        bias: ``[G, out]``.
        counts: number of rows of each group, on the host.
    """
    out: Tensor = _GroupBias.apply(x, bias, tuple(counts))
    return out


def grouped_linear_reference(
    x: Tensor, weight: Tensor, counts: Sequence[int], find_sum: FindSum | None = None
) -> Tensor:
    """:func:`grouped_linear` in plain torch, with all gradients from autograd."""
    return torch.cat([rows @ w.t() for rows, w in zip(x.split(list(counts)), weight, strict=True)])


def grouped_linear(x: Tensor, weight: Tensor, counts: Sequence[int], find_sum: FindSum | None = None) -> Tensor:
    """``x_g W_g^T`` for every group ``g`` of consecutive rows.

    Args:
        x: ``[n, in]``, the groups one after the other; groups may be empty.
        weight: ``[G, out, in]``.
        counts: number of rows of each group, on the host: nothing waits for the device.
        find_sum: finds the sum to which the weights' gradient is added; ``None`` to return it to autograd.

    Returns:
        ``[n, out]``.
    """
    out: Tensor = GROUPED_LINEAR.on(x.device.type)(x, weight, counts, find_sum)
    return out


class _Kernels(NamedTuple):
    """Products of all groups.

    Attributes:
        groups: function of the rows and the number of rows of each group that gives what the other two know groups by.
        multiply: ``[n, k]`` and ``[G, k, m]`` to ``[n, m]``, the rows of each group times its matrix.
        weight_gradients: see :func:`_weight_gradients`.
    """

    groups: Callable[[Tensor, Sequence[int]], Any]
    multiply: Callable[[Tensor, Tensor, Any], Tensor]
    weight_gradients: Callable[[Tensor, Tensor, Tensor, Any], Tensor]


def _ends(x: Tensor, counts: Sequence[int]) -> Tensor:
    """Row behind the last one of each group; the host does not wait for the copy."""
    ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32, pin_memory=x.is_cuda)
    return ends.to(x.device, non_blocking=True)


_ONE_BY_ONE = _Kernels(
    lambda x, counts: counts,
    lambda x, factors, counts: _multiply(x, factors.unbind(), counts),
    _weight_gradients,
)
_AT_ONCE = _Kernels(
    _ends,
    lambda x, factors, ends: F.grouped_mm(x, factors, offs=ends),
    lambda grad, x, weight, ends: F.grouped_mm(grad.t(), x, offs=ends),
)


def grouped_in_place(x: Tensor, weight: Tensor, counts: Sequence[int], find_sum: FindSum | None = None) -> Tensor:
    """:func:`grouped_linear` with one product per group, each written into its rows of the output."""
    out: Tensor = _GroupedLinear.apply(x, weight, tuple(counts), _ONE_BY_ONE, find_sum)
    return out


def grouped_product(x: Tensor, weight: Tensor, counts: Sequence[int], find_sum: FindSum | None = None) -> Tensor:
    """:func:`grouped_linear` by torch's kernel for all groups at once; tested by training Mixtral in ``tests/cuda``.

    No kernel adds the gradients of all groups to their fp32 sums: these are products of single groups.
    """
    out: Tensor = _GroupedLinear.apply(x, weight, tuple(counts), _AT_ONCE, find_sum)
    return out


def _beyond_kernel(x: Tensor, weight: Tensor, counts: Sequence[int], find_sum: FindSum | None = None) -> str | None:
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
