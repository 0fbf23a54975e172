"""Casts to fp8 and products of fp8, with the formats' ranges on the simulated generation of cards."""

from __future__ import annotations

import torch
from torch import Tensor

from simulated_hpu.ops.registry import define_op
from simulated_hpu.settings import settings

_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_TAKEN = (torch.float32, torch.bfloat16, _E5M2, _E4M3)
_MANTISSA_BITS = {_E4M3: 3, _E5M2: 2}
_SMALLEST_EXPONENT = {_E4M3: -6, _E5M2: -14}


def _largest(dtype: torch.dtype) -> float:
    return settings().product.largest_e4m3 if dtype == _E4M3 else 57344.0


def _rounded(x: Tensor, dtype: torch.dtype, stochastic: bool) -> Tensor:
    """Round ``x`` to an 8-bit format; stochastically, to one of two neighbours with probabilities that keep the mean.

    The numbers come from the device's generator, so that a seed repeats them; a real card draws its own.
    """
    if not stochastic:
        return x.to(dtype)
    exponent = (torch.frexp(x).exponent - 1).clamp(min=_SMALLEST_EXPONENT[dtype])
    step = torch.exp2((exponent - _MANTISSA_BITS[dtype]).float())
    return (torch.floor(x / step + torch.rand(x.shape, device=x.device)) * step).to(dtype)


def _scaled(input: Tensor, scale: Tensor | None, dtype: torch.dtype, stochastic: bool) -> Tensor:
    largest = _largest(dtype)
    scaled = input.float() * (1.0 if scale is None else scale.float())
    return _rounded(scaled.clamp(-largest, largest), dtype, stochastic)


def _amax(input: Tensor, is_amax: bool) -> Tensor:
    """Largest magnitude as an fp32 scalar; an empty tensor if ``is_amax`` is False."""
    if is_amax:
        return input.abs().max().float()
    return torch.empty(0, dtype=torch.float32, device=input.device)


def _cast(
    input: Tensor, scale: Tensor | None = None, stochastic_rounding: bool = False, is_amax: bool = False,
    dtype: torch.dtype | None = None, scale_shape: list[int] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dtype = dtype or _E5M2
    if input.dtype not in _TAKEN:
        raise RuntimeError("CastToFp8V2 input dtype must be one of [float, bfloat16, float8_e5m2, float8_e4m3fn].")
    if input.dtype in (_E5M2, _E4M3):
        if is_amax:
            raise RuntimeError("CastToFp8V2 must have no amax for float8.")
        if input.dtype != dtype:
            given, wanted = (str(each).replace("torch.f", "F") for each in (input.dtype, dtype))
            text = "CastToFp8V2 input and output must have the same dtype for float8, but are"
            raise RuntimeError(f"{text} {given} and {wanted}")
    return _scaled(input, scale, dtype, stochastic_rounding), _amax(input, is_amax)


def _cast_hybrid(
    input: Tensor, scale_152: Tensor | None = None, scale_143: Tensor | None = None,
    stochastic_rounding: bool = False, is_amax: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if input.dtype not in (torch.float32, torch.bfloat16):
        raise RuntimeError("CastToFp8Hybrid input must be of float or bfloat16 dtype.")
    return (
        _scaled(input, scale_152, _E5M2, stochastic_rounding),
        _scaled(input, scale_143, _E4M3, False),
        _amax(input, is_amax),
    )


def _gemm(
    A: Tensor, trans_A: bool, B: Tensor, trans_B: bool, D: Tensor | None, out_dtype: torch.dtype,
    A_scale_inv: Tensor | None = None, B_scale_inv: Tensor | None = None, bias: Tensor | None = None,
    accumulate: bool = False, B_scale_shape: list[int] | None = None,
) -> Tensor:  # fmt: skip
    if A.dtype != B.dtype and not settings().product.multiplies_two_formats:
        # An assertion of the matrix engine; its effect inside a graph is not known.
        raise RuntimeError("Gaudi2 doesnt support mixed input type flavors")
    a, b = A.float(), B.float()
    if A_scale_inv is not None:
        a = a * A_scale_inv.float()
    if B_scale_inv is not None:
        b = b * B_scale_inv.float()
    out = (a.transpose(-2, -1) if trans_A else a) @ (b.transpose(-2, -1) if trans_B else b)
    if bias is not None:
        out = out + bias.float()
    if accumulate:
        assert D is not None
        out = out + D.float()
    return out.to(out_dtype)


def define() -> None:
    """Define the casts and the product."""
    define_op(
        "cast_to_fp8_v2(Tensor input, Tensor? scale=None, bool stochastic_rounding=False, bool is_amax=False, "
        "ScalarType dtype=None, int[]? scale_shape=None) -> (Tensor, Tensor)",
        _cast,
    )
    define_op(
        "cast_to_fp8_hybrid(Tensor input, Tensor? scale_152=None, Tensor? scale_143=None, "
        "bool stochastic_rounding=False, bool is_amax=False) -> (Tensor, Tensor, Tensor)",
        _cast_hybrid,
    )
    define_op(
        "fp8_gemm_v2(Tensor A, bool trans_A, Tensor B, bool trans_B, Tensor? D, ScalarType out_dtype, "
        "Tensor? A_scale_inv=None, Tensor? B_scale_inv=None, Tensor? bias=None, bool accumulate=False, "
        "int[]? B_scale_shape=None) -> Tensor",
        _gemm,
    )
