"""Dropout that saves one byte per element for backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.device import as_result


class _Dropout(torch.autograd.Function):
    """Saves a mask of one byte per element; on a CPU torch saves a scaled mask in the dtype of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1.0 - p)
        ctx.save_for_backward(mask)
        ctx.scale = 1.0 / (1.0 - p)
        return as_result(x.mul(mask).mul_(ctx.scale))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return grad.mul(mask).mul_(ctx.scale), None


def dropout(x: Tensor, p: float) -> Tensor:
    """Zero each element with probability ``p < 1`` and scale the others by ``1 / (1 - p)``: ``F.dropout``."""
    if x.device.type == "cpu":
        out: Tensor = _Dropout.apply(x, p)
        return out
    return F.dropout(x, p)
