"""Normalization over the hidden dimension. Statistics are always fp32, whatever the input's dtype."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.device import as_result
from lightning_megatron.device.hpu_bridge import bridge, requires
from lightning_megatron.ops.implementation import Function, Implementation, Op


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / rms(x) * weight`` (https://arxiv.org/abs/1910.07467) in plain torch."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


class _RMSNorm(torch.autograd.Function):
    """The norm in few passes over memory, which limit its speed on a CPU: torch has no fused kernel there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        inverse = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return as_result((wide * inverse).to(x.dtype).mul_(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        wide, grad, scale = x.float().flatten(0, -2), grad.float().flatten(0, -2), weight.float()
        inverse = inverse.flatten(0, -2)
        products = grad * wide
        d_weight = inverse.t().mm(products).squeeze(0)
        # dx = r (g w - x r^2 mean(g w x)): the mean is a matrix-vector product with `products`, which dw uses too.
        along = products.mv(scale).unsqueeze(-1).mul_(inverse.pow(3)).div_(-x.shape[-1])
        dx = torch.mul(grad, scale, out=products).mul_(inverse).addcmul_(wide, along)
        return dx.to(x.dtype).view(x.shape), d_weight.to(weight.dtype), None


def rms_norm_cpu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """:func:`rms_norm` in few passes over memory."""
    out: Tensor = _RMSNorm.apply(x, weight, eps)
    return out


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """:func:`rms_norm` by torch, fused where torch has a kernel for the device."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rms_norm_hpu(kernel: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """:func:`rms_norm` by Intel's ``FusedRMSNorm``; never run on a real Gaudi.

    The weight is cast to the dtype of ``x``, else the result would be fp32.
    """
    out: Tensor = kernel.apply(x, weight.to(x.dtype), eps, True, 0)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of ``[..., H]`` with weight ``[H]``."""
    out: Tensor = RMS_NORM.on(x.device.type)(x, weight, eps)
    return out


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """:func:`layer_norm` in plain torch."""
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight + bias


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm of ``[..., H]`` (https://arxiv.org/abs/1607.06450) with weight and bias ``[H]``: torch's kernel."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


_FUSED_RMS_NORM = "hpex.normalization", "FusedRMSNorm"
RMS_NORM: Op[Function] = Op(
    "rms_norm",
    (
        Implementation("few passes", "cpu", lambda: rms_norm_cpu),
        Implementation("torch's kernel", "cuda", lambda: rms_norm_torch),
        Implementation(
            "FusedRMSNorm", "hpu", lambda: partial(rms_norm_hpu, bridge(*_FUSED_RMS_NORM)), requires(*_FUSED_RMS_NORM)
        ),
        Implementation("torch", None, lambda: rms_norm_torch),
    ),
    run=rms_norm,
    reference=rms_norm_reference,
)
LAYER_NORM = Op(
    "layer_norm",
    tuple(Implementation("torch's kernel", device, lambda: layer_norm) for device in ("cpu", "cuda", "hpu")),
    run=layer_norm,
    reference=layer_norm_reference,
)
