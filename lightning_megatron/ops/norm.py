"""Normalization over the hidden dimension. Statistics are always fp32, whatever the input's dtype."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / rms(x) * weight`` (https://arxiv.org/abs/1910.07467) in plain torch: the meaning of :func:`rms_norm`."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


class _RMSNorm(torch.autograd.Function):
    """The norm in few passes over memory, which is what it costs on a CPU: torch has no fused kernel there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        inverse = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        wide, grad, scale = x.float().flatten(0, -2), grad.float().flatten(0, -2), weight.float()
        inverse = inverse.flatten(0, -2)
        products = grad * wide
        d_weight = inverse.t().mm(products).squeeze(0)
        # dx = r (g w - x r^2 mean(g w x)): the mean is a matrix-vector product of what the weight needed too.
        along = products.mv(scale).unsqueeze(-1).mul_(inverse.pow(3)).div_(-x.shape[-1])
        dx = torch.mul(grad, scale, out=products).mul_(inverse).addcmul_(wide, along)
        return dx.to(x.dtype).view(x.shape), d_weight.to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of ``[..., H]`` with weight ``[H]``."""
    if x.device.type == "cpu":
        out: Tensor = _RMSNorm.apply(x, weight, eps)
        return out
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm of ``[..., H]`` (https://arxiv.org/abs/1607.06450) with weight and bias ``[H]``."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)
