"""Matrix products of 8-bit floating-point numbers (https://arxiv.org/abs/2209.05433).

A tensor is multiplied by a scale, so that its largest magnitude comes close to the largest number of the format, and
rounded to 8 bits: E4M3 for activations and weights, E5M2 for gradients. Products are summed in fp32, and divided by
both scales. Scales are powers of two: multiplying by them rounds nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_megatron.arguments import OneOf, at_least, field_problems
from lightning_megatron.errors import Problem, nearest_names
from lightning_megatron.ops.hpu_bridge import missing
from lightning_megatron.ops.implementation import REFERENCE, Implementation, Selectable, Selection

LARGEST = {torch.float8_e4m3fn: 240.0, torch.float8_e5m2: 57344.0}
"""Largest magnitude of each format. E4M3 ends at 240 on Gaudi 2, at 448 elsewhere; here 240 holds for Gaudi 3 too."""
MULTIPLE = 16
"""Dimensions of operands must be multiples of this."""
LINEARS = ("qkv", "out", "fc1", "fc2")


class Fp8Kernels(NamedTuple):
    """The two kernels that fp8 linear layers call.

    Attributes:
        cast: function of ``x, scale, dtype``: ``x * scale`` in that dtype, clamped to its largest magnitude.
        product: function of ``a [n, k], b [k, m], a_scale, b_scale, bias, dtype``:
            ``a b / (a_scale b_scale) + bias``.
    """

    cast: Callable[[Tensor, Tensor, torch.dtype], Tensor]
    product: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, torch.dtype], Tensor]


def cast_reference(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``cast`` in plain torch."""
    return (x.float() * scale).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


def product_reference(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``product`` in plain torch."""
    out = a.float().matmul(b.float()) / (a_scale * b_scale)
    return (out if bias is None else out + bias.float()).to(dtype)


def cast_hpu(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``cast`` by Intel's operator; never run on a real Gaudi."""
    out: Tensor = torch.ops.hpu.cast_to_fp8_v2(x, scale, False, False, dtype)[0]
    return out


def product_hpu(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``product`` by Intel's operator, with flags for transposed operands; never run on a real Gaudi."""
    a, a_transposed = _contiguous(a)
    b, b_transposed = _contiguous(b)
    scales = a_scale.reciprocal(), b_scale.reciprocal()
    out: Tensor = torch.ops.hpu.fp8_gemm_v2(a, a_transposed, b, b_transposed, None, dtype, *scales, bias, False)
    return out


def _contiguous(x: Tensor) -> tuple[Tensor, bool]:
    """The contiguous matrix, and True if it is ``x`` transposed."""
    return (x, False) if x.is_contiguous() else (x.t(), True)


def scale_for(largest_seen: Tensor, largest: Tensor | float, margin: int = 0) -> Tensor:
    """The power of two that brings ``largest_seen`` to at most ``largest / 2^margin``; 1 if there is none."""
    exponent = torch.floor(torch.log2(largest / largest_seen)) - margin
    scale = torch.exp2(exponent.clamp(-126, 126))  # fp32 has an inverse for these
    return torch.where((largest_seen > 0) & largest_seen.isfinite(), scale, torch.ones_like(scale))


@dataclass(frozen=True)
class Fp8Recipe:
    """Linear layers of a block that use fp8, and the scaling of their tensors.

    A scale is computed from the largest magnitudes of earlier steps ("delayed scaling"): finding the largest element of
    a tensor first would cost a pass over it.

    Attributes:
        linears: names out of ``LINEARS``.
        amax_history_len: number of optimizer steps whose magnitudes are kept.
        amax_compute: ``"max"`` of the steps kept, or the ``"most_recent"`` one.
        margin: powers of two that a tensor may grow by before it is clamped.
        first_layers: number of layers at the beginning without fp8.
        last_layers: number of layers at the end without fp8.
    """

    linears: tuple[str, ...] = LINEARS
    amax_history_len: int = 16
    amax_compute: str = "max"
    margin: int = 0
    first_layers: int = 1
    last_layers: int = 1

    def problems(self) -> list[Problem]:
        """Every fault of the fields."""
        least = {"amax_history_len": at_least(1)} | dict.fromkeys(
            ("margin", "first_layers", "last_layers"), at_least(0)
        )
        found = field_problems(self, {**least, "amax_compute": OneOf(("max", "most_recent"))})
        if not any(problem.argument == "linears" for problem in found):
            found += [
                Problem("linears", name, "no linear layer of a block", nearest_names(name, LINEARS))
                for name in self.linears
                if name not in LINEARS
            ]
        return [replace(problem, argument=f"fp8.{problem.argument}") for problem in found]

    def excuse(self, linear: str, layer: int, num_layers: int) -> str | None:
        """The reason why a linear layer does not use fp8; ``None`` if it does."""
        if linear not in self.linears:
            return f"the recipe has only {', '.join(self.linears)}"
        if not self.first_layers <= layer < num_layers - self.last_layers:
            return f"the first {self.first_layers} and last {self.last_layers} layers are not"
        return None


REFERENCE_KERNELS = Fp8Kernels(cast_reference, product_reference)
HPU_KERNELS = Fp8Kernels(cast_hpu, product_hpu)


def _hpu_operators_missing() -> str | None:
    if all(hasattr(torch.ops.hpu, name) for name in ("cast_to_fp8_v2", "fp8_gemm_v2")):
        return None
    return missing("core", "mark_step") or "the bridge has no such operators"


LINEAR_FP8: Selectable[Fp8Kernels] = Selectable(
    "linear_fp8",
    (Implementation("hpu::fp8_gemm_v2", "hpu", lambda: HPU_KERNELS, _hpu_operators_missing),),
    default="off",
)
"""Kernels by device. It is no op: linear layers call the two kernels, and without them do not use fp8 at all."""


def choose_fp8_kernels(device: str, mode: str | None = None) -> tuple[Fp8Kernels | None, Selection]:
    """The kernels of a device; ``None`` for products in the dtype of their operands.

    Args:
        device: type of device.
        mode: the user's mode for ``linear_fp8``; ``None`` for the default.

    Raises:
        ConfigError: if they are required and the device has none.
    """
    usable, why = LINEAR_FP8.usable(device, mode)
    if not usable:
        return None, Selection(LINEAR_FP8.name, REFERENCE, why)
    return usable[0].bind(), Selection(LINEAR_FP8.name, usable[0].name, why)
