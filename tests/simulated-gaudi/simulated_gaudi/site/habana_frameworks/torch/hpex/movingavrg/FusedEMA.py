"""Exponential moving average of a model's state."""

from __future__ import annotations

import copy
import math

import torch
from simulated_hpu import calls
from torch import nn

_WARM_UP = 2000  # updates over which the decay grows to its full value


class FusedEMA:
    """Exponential moving average of a model.

    Args:
        model: model to average.
        decay: share of the average that an update keeps.
        updates: number of updates already made.

    Attributes:
        ema: the average, a model.
        updates: number of updates so far.
    """

    def __init__(self, model: nn.Module, decay: float = 0.9999, updates: int = 0) -> None:
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"Invalid decay value: {decay}")
        self.ema = copy.deepcopy(model).eval()
        self.ema.requires_grad_(False)
        self.decay = decay
        self.updates = updates

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Update the average with the model's state."""
        calls.count("FusedEMA.update")
        self.updates += 1
        kept = self.decay * (1 - math.exp(-self.updates / _WARM_UP))
        new = model.state_dict()
        for name, average in self.ema.state_dict().items():
            if average.dtype.is_floating_point:
                average.mul_(kept).add_(new[name], alpha=1 - kept)
