"""Megatron-LM's learning-rate and weight-decay schedules, as functions of the training step.

The caller chooses the unit of ``step``, steps or samples, and uses it for all lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_megatron.errors import Problem, raise_if_any

LRStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "wsd"]
TailStyle = Literal["exponential", "linear", "cosine", "minus_sqrt"]
WDStyle = Literal["constant", "linear", "cosine"]

# Each maps the elapsed fraction of the decay, 0..1, to the remaining fraction of (max - min).
_DECAY: dict[str, Callable[[float], float]] = {
    "linear": lambda r: 1 - r,
    "cosine": lambda r: (1 + math.cos(math.pi * r)) / 2,
}
_TAIL: dict[str, Callable[[float], float]] = {
    **_DECAY,
    "exponential": lambda q: 2 * 0.5**q - 1,
    "minus_sqrt": lambda q: 1 - math.sqrt(q),
}


def _choice(argument: str, value: str, kind: object) -> list[Problem]:
    known = get_args(kind)
    return [] if value in known else [Problem(argument, value, "is not a schedule", known)]


@dataclass(frozen=True)
class LRSchedule:
    """A learning rate that warms up linearly and then decays.

    Attributes:
        max_lr: learning rate at the end of the warm-up.
        min_lr: learning rate at the end of the decay.
        init_lr: learning rate at the start of the warm-up.
        warmup: length of the warm-up.
        decay: step at which ``min_lr`` is reached, warm-up included; not needed for ``"constant"``.
        style: shape of the decay. ``"wsd"`` (warm-up, stable, decay; https://arxiv.org/abs/2404.06395) stays at
            ``max_lr`` until a tail.
        tail: length of the tail of ``"wsd"``, which ends at ``decay``.
        tail_style: shape of that tail.

    Raises:
        ConfigError: for invalid values.
    """

    max_lr: float
    min_lr: float = 0.0
    init_lr: float = 0.0
    warmup: int = 0
    decay: int = 0
    style: LRStyle = "cosine"
    tail: int = 0
    tail_style: TailStyle = "exponential"

    def __post_init__(self) -> None:
        found = _choice("style", self.style, LRStyle) + _choice("tail_style", self.tail_style, TailStyle)
        if self.max_lr <= 0:
            found.append(Problem("max_lr", self.max_lr, "must be positive"))
        if not 0 <= self.min_lr <= self.max_lr:
            found.append(Problem("min_lr", self.min_lr, f"must lie between 0 and max_lr={self.max_lr}"))
        if not 0 <= self.init_lr <= self.max_lr:
            found.append(Problem("init_lr", self.init_lr, f"must lie between 0 and max_lr={self.max_lr}"))
        if self.warmup < 0:
            found.append(Problem("warmup", self.warmup, "cannot be negative", (0,)))
        if self.style != "constant" and self.decay <= self.warmup:
            reason = f"the decay must end after the warm-up, {self.warmup}; the warm-up counts as part of it"
            found.append(Problem("decay", self.decay, reason))
        if self.style == "wsd" and not 0 < self.tail <= self.decay - self.warmup:
            reason = f"the tail of a wsd schedule takes between 1 and decay - warmup = {self.decay - self.warmup}"
            found.append(Problem("tail", self.tail, reason))
        if self.style != "wsd" and self.tail:
            found.append(Problem("tail", self.tail, f"only a wsd schedule has a tail, this one is {self.style}", (0,)))
        raise_if_any(found)

    def learning_rate(self, step: int) -> float:
        """The learning rate at ``step``."""
        if self.warmup > 0 and step <= self.warmup:
            return self.init_lr + (self.max_lr - self.init_lr) * step / self.warmup
        if self.style == "constant":
            return self.max_lr
        if step > self.decay:
            return self.min_lr
        if self.style == "inverse-square-root":
            return max(self.min_lr, self.max_lr * math.sqrt(max(self.warmup, 1) / max(step, 1)))
        return self.min_lr + self._left(step) * (self.max_lr - self.min_lr)

    def _left(self, step: int) -> float:
        if self.style == "wsd":
            begun = step - (self.decay - self.tail)
            return 1.0 if begun <= 0 else _TAIL[self.tail_style](begun / self.tail)
        return _DECAY[self.style]((step - self.warmup) / (self.decay - self.warmup))


@dataclass(frozen=True)
class WDSchedule:
    """A weight decay that rises from ``start`` to ``end``.

    Attributes:
        start: weight decay at step 0.
        end: weight decay from step ``length`` on.
        length: length of the rise.
        style: shape of the rise; ``"constant"`` needs ``start == end``.

    Raises:
        ConfigError: for invalid values.
    """

    start: float
    end: float
    length: int = 0
    style: WDStyle = "constant"

    def __post_init__(self) -> None:
        found = _choice("style", self.style, WDStyle)
        if self.start < 0:
            found.append(Problem("start", self.start, "a weight decay cannot be negative"))
        if self.end < self.start:
            found.append(Problem("end", self.end, f"the weight decay rises from start={self.start}"))
        if self.style == "constant" and self.start != self.end:
            found.append(Problem("style", self.style, f"{self.start} and {self.end} differ", ("linear", "cosine")))
        if self.style != "constant" and self.length <= 0:
            found.append(Problem("length", self.length, "a rise takes at least one step", (1,)))
        raise_if_any(found)

    def weight_decay(self, step: int) -> float:
        """The weight decay at ``step``."""
        if self.style == "constant" or step > self.length:
            return self.end
        return self.end - _DECAY[self.style](step / self.length) * (self.end - self.start)


class MegatronLR(LambdaLR):
    """The schedules as one torch scheduler; give it to Lightning with ``"interval": "step"``.

    Each group's own ``lr`` and ``weight_decay`` are the maxima of the schedules: a group with twice the ``lr`` keeps
    twice the rate, a group with ``weight_decay=0`` is never decayed.

    Args:
        lr: learning-rate schedule.
        wd: weight-decay schedule; ``None`` for a constant weight decay.
        step_size: units of the schedules in one optimizer step (the global batch size, if the unit is samples).
        last_epoch: argument of torch's ``LRScheduler``.

    Attributes:
        position: place in the schedules, in their unit.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr: LRSchedule,
        wd: WDSchedule | None = None,
        step_size: int = 1,
        last_epoch: int = -1,
    ) -> None:
        self._lr, self._wd = lr, wd
        self._step_size = step_size
        self._base_wd = [group.get("weight_decay", 0.0) for group in optimizer.param_groups]
        self.position = last_epoch * step_size  # torch's constructor makes one more step
        super().__init__(optimizer, lambda _: self._lr.learning_rate(self.position) / self._lr.max_lr, last_epoch)

    @property
    def moves_weight_decay(self) -> bool:
        """True if the weight decay has a schedule, too."""
        return self._wd is not None

    def step(self, epoch: int | None = None, units: int | None = None) -> None:
        """Advance by one optimizer step.

        Args:
            epoch: argument of torch's schedulers: number of optimizer steps to go to.
            units: units of this step, if steps differ; ``None`` for ``step_size``.
        """
        self.position += self._step_size if units is None else units
        if epoch is not None:
            self.position = epoch * self._step_size
        super().step(epoch)
        if self._wd is not None and self._wd.end > 0:
            factor = self._wd.weight_decay(self.position) / self._wd.end
            for group, base in zip(self.optimizer.param_groups, self._base_wd, strict=True):
                if "weight_decay" in group:
                    group["weight_decay"] = base * factor

    def state_dict(self) -> dict[str, Any]:
        """torch's state, with the schedules."""
        schedules = {"lr": asdict(self._lr), "wd": None if self._wd is None else asdict(self._wd)}
        return {name: value for name, value in super().state_dict().items() if name not in ("_lr", "_wd")} | schedules

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore schedules and position; state of earlier versions has only the number of steps."""
        at = state_dict["last_epoch"] * state_dict.get("_step_size", self._step_size)
        state = {"position": at, **state_dict}
        lr, wd = state.pop("lr", None), state.pop("wd", None)
        if lr is not None:
            self._lr, self._wd = LRSchedule(**lr), None if wd is None else WDSchedule(**wd)
        super().load_state_dict(state)
