"""The dynamic loss scale of fp16 training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_megatron.arguments import Rule, Rules, above, at_least, field_problems
from lightning_megatron.errors import Problem, raise_if_any

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
    overflows only skip the step, and every further one shrinks the scale. Only a growth resets that count.

    Attributes:
        scale: the current factor.
        minimum: lower bound of the scale.
        growth_interval: number of consecutive steps without overflow after which the scale grows.
        growth_factor: factor by which the scale grows.
        backoff_factor: factor by which the scale shrinks.
        hysteresis: number of overflows since the last growth at which the scale begins to shrink.
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
        """Factor that removes the scale from gradients."""
        return 1.0 / self.scale

    def update(self, found_inf: bool) -> None:
        """Account for one step.

        Args:
            found_inf: True if any rank's gradient overflowed, so that the step was skipped.
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
        """The state that changes during training, as plain numbers."""
        return {"scale": self.scale, "good_steps": self._good_steps, "tolerated_overflows": self._tolerated}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self.scale = float(state["scale"])
        self._good_steps = int(state["good_steps"])
        self._tolerated = int(state["tolerated_overflows"])

    def grad_scaler_state(self) -> dict[str, float]:
        """The state of a ``torch.amp.GradScaler`` that goes on from here, without hysteresis."""
        settings = "scale", "growth_factor", "backoff_factor", "growth_interval"
        return {name: getattr(self, name) for name in settings} | {"_growth_tracker": self._good_steps}

    def load_grad_scaler_state(self, state: Mapping[str, float]) -> None:
        """Go on from a ``torch.amp.GradScaler``, with the settings and the hysteresis of this loss scale."""
        self.scale = float(state["scale"])
        self._good_steps = int(state["_growth_tracker"]) % self.growth_interval
        self._tolerated = self.hysteresis
