"""Gradient clipping by the norm of this process's gradients: of sharded gradients that is not the global norm."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from simulated_hpu import calls
from torch import Tensor

_EPSILON = 1e-6


class FusedClipNorm:
    """Clips gradients in place.

    Args:
        parameters: parameters whose gradients are clipped.
        max_norm: largest norm after clipping.
    """

    def __init__(self, parameters: Iterable[Tensor], max_norm: float) -> None:
        self.max_norm = max_norm

    @torch.no_grad()
    def clip_norm(self, parameters: Iterable[Tensor] | Tensor) -> Tensor:
        """Clip, and return the norm before clipping."""
        calls.count("FusedClipNorm.clip_norm")
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        grads = [p.grad for p in params if p.grad is not None]
        if not grads:
            return torch.tensor(0.0)
        total = torch.stack([g.float().square().sum() for g in grads]).sum().sqrt().to(grads[0].dtype)
        coefficient = (self.max_norm / (total + _EPSILON)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(coefficient.to(grad.dtype))
        return total
