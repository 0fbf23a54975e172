"""Callbacks of the strategy's own, which are among the Trainer's for the time of a run."""

from __future__ import annotations

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint

from lightning_megatron.lightning.monitoring.hook_marks import HookMarks
from lightning_megatron.lightning.strategy.kill_switch import KillSwitch
from lightning_megatron.lightning.streams import EvaluationWatch, TrainingWatch

ORDER: tuple[type[Callback], ...] = (TrainingWatch, EvaluationWatch, Callback, KillSwitch, Checkpoint, HookMarks)
"""Order of callbacks during a run: ``Callback`` stands for the user's, ``Checkpoint`` for those that save."""


class OwnCallbacks:
    """Callbacks that the strategy has added to a Trainer's."""

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._added: list[Callback] = []

    def add(self, trainer: Trainer | None, *callbacks: Callback) -> None:
        """Put callbacks at their places among those of a Trainer; no action without one."""
        if trainer is None:
            return
        self._trainer = trainer
        present: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            self._added.append(callback)
            place = self._place(callback)
            later = (number for number, other in enumerate(present) if self._place(other) > place)
            present.insert(next(later, len(present)), callback)

    def remove(self) -> None:
        """Take them out again."""
        if self._trainer is not None:
            present: list[Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
            present[:] = [callback for callback in present if callback not in self._added]
        self._trainer, self._added = None, []

    def _place(self, callback: Callback) -> int:
        if callback in self._added:
            return ORDER.index(type(callback))
        return ORDER.index(Checkpoint if isinstance(callback, Checkpoint) else Callback)
