"""Normalization over the hidden dimension. Statistics are always fp32, whatever the input's dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / rms(x) * weight`` (https://arxiv.org/abs/1910.07467) in plain torch: the meaning of :func:`rms_norm`."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of ``[..., H]`` with weight ``[H]``."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm of ``[..., H]`` (https://arxiv.org/abs/1607.06450) with weight and bias ``[H]``."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)
