"""Gradient clipping by the norm of what this process has: of sharded gradients it is not the whole norm."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from simulated_hpu import calls
from torch import Tensor

_EPSILON = 1e-6


class FusedClipNorm:
    """Clips gradients in place.

    Args:
        parameters: those whose gradients are clipped.
        max_norm: largest norm that is left.
    """

    def __init__(self, parameters: Iterable[Tensor], max_norm: float) -> None:
        self.max_norm = max_norm

    @torch.no_grad()
    def clip_norm(self, parameters: Iterable[Tensor] | Tensor) -> Tensor:
        """Clip, and return the norm that was found."""
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
