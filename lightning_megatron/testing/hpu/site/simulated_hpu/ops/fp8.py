"""Eight-bit floats, in the range of a GAUDI2."""

from __future__ import annotations

import torch
from torch import Tensor

from simulated_hpu.ops.registry import define_op

LARGEST = {torch.float8_e4m3fn: 240.0, torch.float8_e5m2: 57344.0}
_MULTIPLE = 16


def _cast(
    input: Tensor, scale: Tensor | None = None, stochastic_rounding: bool = False, is_amax: bool = False,
    dtype: torch.dtype | None = None, scale_shape: list[int] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dtype = dtype or torch.float8_e5m2
    if stochastic_rounding:
        raise NotImplementedError("stochastic rounding is not simulated")
    largest = LARGEST[dtype]
    scaled = input.float() * (1.0 if scale is None else scale.float())
    amax = input.abs().max().float() if is_amax else torch.zeros((), device=input.device)
    return scaled.clamp(-largest, largest).to(dtype), amax


def _gemm(
    A: Tensor, trans_A: bool, B: Tensor, trans_B: bool, D: Tensor | None, out_dtype: torch.dtype,
    A_scale_inv: Tensor | None = None, B_scale_inv: Tensor | None = None, bias: Tensor | None = None,
    accumulate: bool = False, B_scale_shape: list[int] | None = None,
) -> Tensor:  # fmt: skip
    for matrix in (A, B):
        if any(size % _MULTIPLE for size in matrix.shape[-2:]):
            raise RuntimeError(f"fp8_gemm_v2: sizes must be multiples of {_MULTIPLE}, not {tuple(matrix.shape)}")
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
    """Define the cast and the product."""
    define_op(
        "cast_to_fp8_v2(Tensor input, Tensor? scale=None, bool stochastic_rounding=False, bool is_amax=False, "
        "ScalarType dtype=None, int[]? scale_shape=None) -> (Tensor, Tensor)",
        _cast,
    )
    define_op(
        "fp8_gemm_v2(Tensor A, bool trans_A, Tensor B, bool trans_B, Tensor? D, ScalarType out_dtype, "
        "Tensor? A_scale_inv=None, Tensor? B_scale_inv=None, Tensor? bias=None, bool accumulate=False, "
        "int[]? B_scale_shape=None) -> Tensor",
        _gemm,
    )
