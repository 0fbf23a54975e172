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
from lightning_megatron.ops.hpu_bridge import lacks
from lightning_megatron.ops.implementation import Op, Version

LARGEST = {torch.float8_e4m3fn: 240.0, torch.float8_e5m2: 57344.0}
"""By format. Gaudi 2 ends E4M3 at 240, where others reach 448; a Gaudi 3 is kept to that too."""
MULTIPLE = 16
"""What the dimensions of operands must be multiples of."""
LINEARS = ("qkv", "out", "fc1", "fc2")


class Fp8Kernels(NamedTuple):
    """What a device must be able to do.

    Attributes:
        cast: ``x, scale, dtype`` to ``x * scale`` in that dtype, what is too large cut to the largest.
        product: ``a [n, k], b [k, m], a_scale, b_scale, bias, dtype`` to ``a b / (a_scale b_scale) + bias``.
    """

    cast: Callable[[Tensor, Tensor, torch.dtype], Tensor]
    product: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, torch.dtype], Tensor]


def cast_reference(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The meaning of ``cast`` in plain torch."""
    return (x.float() * scale).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


def product_reference(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The meaning of ``product`` in plain torch."""
    out = a.float().matmul(b.float()) / (a_scale * b_scale)
    return (out if bias is None else out + bias.float()).to(dtype)


def cast_hpu(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``cast`` by Intel's operator; never run on a real Gaudi."""
    out: Tensor = torch.ops.hpu.cast_to_fp8_v2(x, scale, False, False, dtype)[0]
    return out


def product_hpu(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``product`` by Intel's operator, which takes an operand as it lies or transposed; never run on a real Gaudi."""
    a, a_turned = _as_it_lies(a)
    b, b_turned = _as_it_lies(b)
    scales = a_scale.reciprocal(), b_scale.reciprocal()
    out: Tensor = torch.ops.hpu.fp8_gemm_v2(a, a_turned, b, b_turned, None, dtype, *scales, bias, False)
    return out


def _as_it_lies(x: Tensor) -> tuple[Tensor, bool]:
    return (x, False) if x.is_contiguous() else (x.t(), True)


def scale_for(largest_seen: Tensor, largest: Tensor | float, margin: int = 0) -> Tensor:
    """The power of two that brings ``largest_seen`` to at most ``largest / 2^margin``; 1 where nothing was seen."""
    exponent = torch.floor(torch.log2(largest / largest_seen)) - margin
    scale = torch.exp2(exponent.clamp(-126, 126))  # fp32 has an inverse for these
    return torch.where((largest_seen > 0) & largest_seen.isfinite(), scale, torch.ones_like(scale))


@dataclass(frozen=True)
class Fp8Recipe:
    """How scales are found, and which linear layers of a block are done in fp8.

    A scale comes from what was seen in earlier steps ("delayed scaling"): finding the largest element of a tensor first
    would cost a pass over it.

    Attributes:
        linears: some of ``LINEARS``.
        amax_history_len: optimizer steps that are remembered.
        amax_compute: ``"max"`` of the steps remembered, or the ``"most_recent"`` one.
        margin: powers of two that a tensor may grow by before it is cut.
        first_layers: this many at the beginning stay as they are.
        last_layers: the same at the end.
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
        """Why a linear layer is not done in fp8, if it is not."""
        if linear not in self.linears:
            return f"the recipe has only {', '.join(self.linears)}"
        if not self.first_layers <= layer < num_layers - self.last_layers:
            return f"the first {self.first_layers} and last {self.last_layers} layers are not"
        return None


REFERENCE_KERNELS = Fp8Kernels(cast_reference, product_reference)
HPU_KERNELS = Fp8Kernels(cast_hpu, product_hpu)


def _operators_lack() -> str | None:
    if all(hasattr(torch.ops.hpu, name) for name in ("cast_to_fp8_v2", "fp8_gemm_v2")):
        return None
    return lacks("core", "mark_step") or "the bridge has no such operators"


def without_fp8() -> Fp8Kernels | None:
    """No kernels: products in the dtype of their operands."""
    return None


def _hpu_kernels() -> Fp8Kernels:
    return HPU_KERNELS


LINEAR_FP8 = Op(
    "linear_fp8",
    without_fp8,
    without_fp8,
    (Version("hpu::fp8_gemm_v2", "hpu", lambda: _hpu_kernels, _operators_lack),),
    default="off",
)
