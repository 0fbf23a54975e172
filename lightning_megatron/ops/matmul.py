"""Matrix products: in fp32 by the faster library, and in bf16 efficiently on processors without bf16 arithmetic.

Such a processor converts bf16 to fp32 in every multiplication, which takes about four times as long as converting
whole operands to fp32 once and multiplying those. Both ways sum in fp32; the second rounds once, at the end, or not at
all if the caller wants fp32. The fp32 copies are freed after the product. A large weight is copied in blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.by_shape import by_shape
from lightning_megatron.device import multiplies_bf16
from lightning_megatron.ops.cpu.onednn import by_onednn, linear_onednn
from lightning_megatron.ops.implementation import OpChoice

FEW = 16
"""With fewer rows or columns than this, copying the operands costs more than the faster product gains."""
BLOCK_BYTES = 16 << 20
"""Approximate limit for the fp32 copy of a block of the second operand."""


def upcasts(a: Tensor, b: Tensor, *, native: bool | None = None) -> bool:
    """True if ``a b`` is computed in fp32 from fp32 copies. All code decides this by calling this function.

    Ranks of one collective need not agree: shapes and dtypes of results are the same.

    Args:
        a: ``[..., n, k]``.
        b: ``[k, m]``, or ``[..., k, m]`` with a matrix for each of ``a``.
        native: True if the device has arithmetic for bf16; ``None`` asks the device.
    """
    if a.dtype != torch.bfloat16 or b.dtype != torch.bfloat16:
        return False
    if multiplies_bf16(a) if native is None else native:
        return False
    if torch.is_autocast_enabled(a.device.type):  # autocast would convert the copies to bf16 again
        return False
    rows = a.shape[:-1].numel() if b.dim() == 2 else a.shape[-2]
    return min(rows, *b.shape[-2:]) >= FEW


def product_reference(a: Tensor, b: Tensor) -> Tensor:
    """:func:`product` in plain torch, up to one rounding."""
    return a.matmul(b)


def product(a: Tensor, b: Tensor, *, native: bool | None = None) -> Tensor:
    """``a b`` in the precision it was computed in: fp32 if the operands were upcast. Autograd must not record this.

    Args:
        a: ``[..., n, k]``.
        b: ``[k, m]``.
        native: True if the device has arithmetic for bf16; ``None`` asks the device.
    """
    if upcasts(a, b, native=native):
        return matmul_fp32(a, b)
    return _linear_onednn(a, b.t()) if by_onednn(a, b) else product_reference(a, b)


def _linear_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """:func:`linear_onednn`, or its custom operator in a graph of ``torch.compile``."""
    if not torch.compiler.is_compiling():
        return linear_onednn(x, weight, bias)
    from lightning_megatron.ops.cpu import graph_operators

    out: Tensor = graph_operators.linear_onednn(x, weight, bias)
    return out


@by_shape
def matmul_fp32(a: Tensor, b: Tensor, *, block_bytes: int = BLOCK_BYTES) -> Tensor:
    """``a b`` in fp32, for operands of any dtype. Autograd must not record this.

    Args:
        a: ``[..., n, k]``.
        b: ``[k, m]``, upcast block by block along the longer side.
        block_bytes: limit for the fp32 copy of one block.
    """
    a = a.float()
    k, m = b.shape
    blocks = -(-4 * k * m // block_bytes)
    if blocks <= 1:
        return product(a, b.float())
    if m >= k:
        out = a.new_empty(*a.shape[:-1], m)
        step = -(-m // blocks)
        for some, here in zip(b.split(step, 1), out.split(step, -1), strict=True):
            here.copy_(product(a, some.float()))
        return out
    step = -(-k // blocks)
    parts = zip(a.split(step, -1), b.split(step), strict=True)
    return sum((product(x, some.float()) for x, some in parts), start=a.new_zeros(*a.shape[:-1], m))


def matmul(a: Tensor, b: Tensor, *, native: bool | None = None) -> Tensor:
    """:func:`product` rounded to the dtype of its operands."""
    return product(a, b, native=native).to(a.dtype)


def matmul_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Write ``a b`` into ``out``, ``[n, m]``, which may be a view."""
    if upcasts(a, b) or by_onednn(a, b):
        out.copy_(product(a, b))
    else:
        torch.mm(a, b, out=out)


class _Linear(torch.autograd.Function):
    """Saves the operands, not copies in fp32. The gradient of a bf16 weight is fp32, for accumulation in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_shape = None if bias is None else bias.shape
        rows, bias = weight.flatten(0, -2), None if bias is None else bias.flatten()
        if x.dtype == torch.float32:
            return _linear_onednn(x, rows, bias)
        out = matmul_fp32(x, rows.t())
        return (out if bias is None else out.add_(bias)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad
        dx = dw = db = None
        if needs_dx:
            dx = matmul(dy, weight.flatten(0, -2), native=False)
        flat = dy.flatten(0, -2)
        if needs_dw:
            dw = product(flat.t(), x.flatten(0, -2), native=False).view_as(weight)
        if needs_db:
            db = flat.sum(0, dtype=torch.float32).view(ctx.bias_shape)
        return dx, dw, db


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, native: bool | None = None) -> Tensor:
    """``x W^T + b``.

    Args:
        x: ``[..., in]``.
        weight: ``[..., in]``; all dimensions before the last are output features.
        bias: shape of ``weight`` without its last dimension.
        native: True if the device has arithmetic for bf16; ``None`` asks the device.

    Returns:
        ``[..., out]``.
    """
    rows = weight.flatten(0, -2)
    if not upcasts(x, rows.t(), native=native) and not by_onednn(x, rows.t()):
        return F.linear(x, rows, None if bias is None else bias.flatten())
    out: Tensor = _Linear.apply(x, weight, bias)
    return out


class LinearGemms(Protocol):
    """The three GEMMs of a linear layer: forward, input gradient (dgrad), weight gradient (wgrad); not for autograd.

    ``prepare`` is called before each forward, outside of autograd functions. ``forward`` returns, beside its product,
    tensors to be saved for backward.
    """

    # ruff: noqa: D102
    def prepare(self, weight: Tensor) -> None: ...
    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]: ...
    def gradient(self, dy: Tensor) -> Any: ...
    def input_gradient(self, dy: Any, weight: Tensor, kept: Sequence[Tensor]) -> Tensor: ...
    def weight_gradient(self, dy: Any, x: Tensor, kept: Sequence[Tensor]) -> Tensor: ...


class HasGemms(Protocol):
    """A layer whose GEMMs can be replaced.

    Attributes:
        products: its GEMMs.
        product_choice: choice of them, for the op report; ``None`` where there was no choice.
    """

    products: LinearGemms
    product_choice: OpChoice[Any] | None

    @property
    def weight(self) -> Tensor:
        """``[out, in]``, or ``[..., out, in]``."""
        ...


class PlainGemms:
    """GEMMs in the dtype of their operands."""

    def __reduce__(self) -> str:
        return "PLAIN_GEMMS"  # one instance, also for copies of a layer

    def prepare(self, weight: Tensor) -> None:
        """Nothing is needed before a forward."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """``x W^T + b``, ``[..., in] -> [..., out]``."""
        return linear(x, weight, bias), ()

    def gradient(self, dy: Tensor) -> Tensor:
        """The output's gradient in the form that both other gradients use."""
        return dy

    def input_gradient(self, dy: Tensor, weight: Tensor, kept: Sequence[Tensor]) -> Tensor:
        """``dy W``, ``[..., out] -> [..., in]``."""
        return matmul(dy, weight.flatten(0, -2))

    def weight_gradient(self, dy: Tensor, x: Tensor, kept: Sequence[Tensor]) -> Tensor:
        """``dy^T x``, ``[out, in]``."""
        return product(dy.flatten(0, -2).t(), x.flatten(0, -2))


PLAIN_GEMMS = PlainGemms()
