"""Root mean square norm (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from simulated_hpu.ops.registry import define_op


def _forward(data_in: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    x = data_in.float()
    inverse_rms = torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    dtype = data_in.dtype if data_in.dtype == gamma.dtype else torch.float32
    return (x * inverse_rms * gamma.float()).to(dtype), inverse_rms.to(dtype)


def _backward(
    grad_in: Tensor, data_in: Tensor, gamma: Tensor, inverse_rms: Tensor, use_stages: bool, bwd_mode: int
) -> tuple[Tensor, Tensor]:
    g, x, inverse = grad_in.float(), data_in.float(), inverse_rms.float()
    scaled = g * gamma.float()
    dx = inverse * (scaled - x * inverse.square() * (scaled * x).mean(-1, keepdim=True))
    dgamma = (g * x * inverse).flatten(0, -2).sum(0)
    dtypes = {each.dtype for each in (grad_in, data_in, gamma, inverse_rms)}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    return dx.to(dtype), dgamma.to(dtype)


def define() -> None:
    """Define forward and backward, and their fast versions."""
    for fast in ("", "_fast"):
        define_op(f"rms_norm{fast}(Tensor data_in, Tensor gamma, float epsilon) -> (Tensor, Tensor)", _forward)
        define_op(
            f"rms_norm{fast}_backward(Tensor grad_in, Tensor data_in, Tensor gamma, Tensor inverse_rms, "
            "bool use_stages, int bwd_mode) -> (Tensor, Tensor)",
            _backward,
        )
