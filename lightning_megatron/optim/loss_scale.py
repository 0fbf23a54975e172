"""The dynamic loss scale of fp16 training, and when gradients may be reduced in bf16."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_megatron.arguments import Rule, Rules, above, at_least, field_problems
from lightning_megatron.errors import Problem, raise_if_any

_BF16_REDUCE_LIMIT = 256
_RULES: Rules = {
    "scale": above(0.0),
    "minimum": above(0.0),
    "growth_interval": at_least(1),
    "growth_factor": above(1.0),
    "backoff_factor": Rule("above 0 and below 1", lambda value: 0 < value < 1),
    "hysteresis": at_least(1),
}


@dataclass
class DynamicLossScale:
    """Multiplies the loss so that fp16 gradients do not vanish, and backs off when they overflow.

    Megatron-LM's state machine. It differs from torch's GradScaler in its hysteresis: the first ``hysteresis - 1``
    overflows since the last growth only skip the step, and only a growth gives them back.

    Attributes:
        scale: the factor now.
        minimum: the scale never falls below.
        growth_interval: steps in a row without overflow after which the scale grows.
        growth_factor: by which it grows.
        backoff_factor: by which it shrinks.
        hysteresis: overflows since the last growth from which on the scale shrinks.
    """

    scale: float = 2.0**32
    minimum: float = 1.0
    growth_interval: int = 1000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    hysteresis: int = 2

    def __post_init__(self) -> None:
        found = field_problems(self, _RULES)
        if not {"scale", "minimum"} & {problem.argument for problem in found} and self.scale < self.minimum:
            found.append(Problem("scale", self.scale, f"must be at least the minimum, {self.minimum}", (self.minimum,)))
        raise_if_any(found)
        self._good_steps = 0
        self._tolerated = self.hysteresis

    @property
    def inverse(self) -> float:
        """What turns scaled gradients into real ones."""
        return 1.0 / self.scale

    def update(self, found_inf: bool) -> None:
        """Account for one step.

        Args:
            found_inf: whether any rank's gradient overflowed, so that the step was skipped.
        """
        if found_inf:
            self._good_steps = 0
            self._tolerated -= 1
            if self._tolerated <= 0:
                self.scale = max(self.scale * self.backoff_factor, self.minimum)
            return
        self._good_steps += 1
        if self._good_steps == self.growth_interval:
            self._good_steps = 0
            self._tolerated = self.hysteresis
            self.scale *= self.growth_factor

    def state_dict(self) -> dict[str, float]:
        """What changes while training: plain numbers."""
        return {"scale": self.scale, "good_steps": self._good_steps, "tolerated_overflows": self._tolerated}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from :meth:`state_dict`."""
        self.scale = float(state["scale"])
        self._good_steps = int(state["good_steps"])
        self._tolerated = int(state["tolerated_overflows"])


def grad_reduce_dtype_rule(micro_batches: int, dp: int) -> torch.dtype:
    """Dtype in which bf16 training may sum gradients over micro-batches and ranks.

    Gaudi's Megatron-LM fork (release 1.20) allows bf16 while a gradient has at most 256 summands; beyond, the sum is
    so much larger than a summand that bf16's 8 bits lose it. Only Gaudi profits: elsewhere the caller takes fp32.

    Args:
        micro_batches: of one step on one replica.
        dp: replicas.
    """
    return torch.bfloat16 if micro_batches * dp <= _BF16_REDUCE_LIMIT else torch.float32
