"""Matrix products of 8-bit floating-point numbers (https://arxiv.org/abs/2209.05433).

A tensor is multiplied by a scale, so that its largest magnitude comes close to the largest number of the format, and
rounded to 8 bits: E4M3 for activations and weights, E5M2 for gradients. Products are summed in fp32, and divided by
both scales. Scales are powers of two: multiplying by them rounds nothing.

The matrix engine of Gaudi 2 needs both operands in one format, so there activations and weights are cast to E5M2 for
products with gradients. Gaudi 3 multiplies different formats, and its E4M3 reaches 448 instead of 240.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_megatron import device as devices
from lightning_megatron.arguments import OneOf, at_least, field_problems
from lightning_megatron.device import Fp8Arithmetic
from lightning_megatron.device.hpu_bridge import missing
from lightning_megatron.errors import Problem, nearest_names
from lightning_megatron.ops.implementation import Implementation, Op

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST_E5M2 = 57344.0
_MANTISSA_BITS = {E4M3: 3, E5M2: 2}
_SMALLEST_EXPONENT = {E4M3: -6, E5M2: -14}
"""Exponents of the smallest normal numbers."""
DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes that Gaudi can cast to fp8; it cannot cast fp16."""
MULTIPLE = 16
"""Dimensions of operands must be multiples of this: a rule of Intel's Transformer Engine, not of the operators."""
LINEARS = ("qkv", "out", "fc1", "fc2")


class Fp8Kernels(NamedTuple):
    """The kernels that fp8 linear layers call.

    Attributes:
        cast: function of ``x, scale, dtype, stochastic``: ``x * scale`` in that dtype, clamped to its largest
            magnitude and rounded to the nearest number or at random, and the largest magnitude of ``x`` (fp32 scalar).
        cast_both: function of ``x, scale_e5m2, scale_e4m3``: ``x`` in both formats, and its largest magnitude, in one
            pass over ``x``.
        product: function of ``a [n, k], b [k, m], a_scale, b_scale, bias, dtype``:
            ``a b / (a_scale b_scale) + bias``.
        arithmetic: facts about the formats of the card.
    """

    cast: Callable[[Tensor, Tensor, torch.dtype, bool], tuple[Tensor, Tensor]]
    cast_both: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    product: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, torch.dtype], Tensor]
    arithmetic: Fp8Arithmetic

    @property
    def backward_format(self) -> torch.dtype:
        """Format of activations and weights in products with a gradient, which is in E5M2."""
        return E4M3 if self.arithmetic.mixes_formats else E5M2

    def largest(self, dtype: torch.dtype) -> float:
        """Largest magnitude of a format."""
        return self.arithmetic.largest_e4m3 if dtype == E4M3 else LARGEST_E5M2


def cast_reference(
    x: Tensor, scale: Tensor, dtype: torch.dtype, stochastic: bool = False, largest_e4m3: float = 240.0
) -> tuple[Tensor, Tensor]:
    """``cast`` in plain torch."""
    largest = largest_e4m3 if dtype == E4M3 else LARGEST_E5M2
    scaled = (x.float() * scale).clamp(-largest, largest)
    return (round_at_random(scaled, dtype) if stochastic else scaled.to(dtype)), largest_magnitude(x)


def round_at_random(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in an 8-bit format, rounded up or down with the probabilities that keep its mean.

    Args:
        x: fp32, no larger than the largest magnitude of the format.
        dtype: the format.
    """
    exponent = torch.frexp(x).exponent - 1
    step = torch.exp2((exponent.clamp(min=_SMALLEST_EXPONENT[dtype]) - _MANTISSA_BITS[dtype]).float())
    return (torch.floor(x / step + torch.rand_like(x)) * step).to(dtype)


def cast_both_reference(
    x: Tensor, scale_e5m2: Tensor, scale_e4m3: Tensor, largest_e4m3: float = 240.0
) -> tuple[Tensor, Tensor, Tensor]:
    """``cast_both`` in plain torch."""
    e5m2, _ = cast_reference(x, scale_e5m2, E5M2)
    return e5m2, *cast_reference(x, scale_e4m3, E4M3, largest_e4m3=largest_e4m3)


def fp8_product_reference(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``product`` in plain torch."""
    out = a.float().matmul(b.float()) / (a_scale * b_scale)
    return (out if bias is None else out + bias.float()).to(dtype)


def reference_kernels(arithmetic: Fp8Arithmetic) -> Fp8Kernels:
    """The kernels of a card in plain torch."""
    largest = arithmetic.largest_e4m3
    casts = partial(cast_reference, largest_e4m3=largest), partial(cast_both_reference, largest_e4m3=largest)
    return Fp8Kernels(*casts, fp8_product_reference, arithmetic)


def cast_hpu(x: Tensor, scale: Tensor, dtype: torch.dtype, stochastic: bool = False) -> tuple[Tensor, Tensor]:
    """``cast`` by Intel's operator; never run on a real Gaudi.

    Stochastic rounding uses the card's own random numbers, not torch's generator.
    """
    values, amax = torch.ops.hpu.cast_to_fp8_v2(x, scale, stochastic, True, dtype)
    return values, amax


def cast_both_hpu(x: Tensor, scale_e5m2: Tensor, scale_e4m3: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``cast_both`` by Intel's operator; never run on a real Gaudi."""
    e5m2, e4m3, amax = torch.ops.hpu.cast_to_fp8_hybrid(x, scale_e5m2, scale_e4m3, False, True)
    return e5m2, e4m3, amax


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


def largest_magnitude(x: Tensor) -> Tensor:
    """The largest magnitude of a tensor, an fp32 scalar; costs a pass over it."""
    return torch.linalg.vector_norm(x, float("inf")).float()


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
        margin: headroom, in powers of two, by which a tensor may grow before it is clamped.
        first_layers: number of layers at the beginning without fp8.
        last_layers: number of layers at the end without fp8.
        stochastic_rounding: True to round gradients up or down at random, so that their mean is kept; False to round
            them to the nearest number, which is the same in each run.
        keep_weights: True to cast each weight once in an optimizer step and keep it in fp8 until the step ends: one
            byte an element, on Gaudi 2 two. False to cast it in every forward and backward.
    """

    linears: tuple[str, ...] = LINEARS
    amax_history_len: int = 16
    amax_compute: str = "max"
    margin: int = 0
    first_layers: int = 1
    last_layers: int = 1
    stochastic_rounding: bool = True
    keep_weights: bool = True

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
            return f"the recipe excludes the first {self.first_layers} and last {self.last_layers} layers"
        return None


REFERENCE_KERNELS = reference_kernels(Fp8Arithmetic())


def _hpu_kernels() -> Fp8Kernels:
    arithmetic = devices.fp8_arithmetic(torch.device(devices.HPU.type))
    return Fp8Kernels(cast_hpu, cast_both_hpu, product_hpu, arithmetic)


def _hpu_operators_missing() -> str | None:
    if all(hasattr(torch.ops.hpu, name) for name in ("cast_to_fp8_v2", "cast_to_fp8_hybrid", "fp8_gemm_v2")):
        return None
    return missing("core", "mark_step") or "the bridge has no such operators"


LINEAR_FP8: Op[Fp8Kernels | None] = Op(
    "linear_fp8",
    (Implementation("hpu::fp8_gemm_v2", "hpu", _hpu_kernels, _hpu_operators_missing),),
    reference=None,
    default="off",
)
"""Kernels by device, which linear layers call. Without them they do not use fp8 at all."""
