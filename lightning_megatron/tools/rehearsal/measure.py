"""Callback that reads the tracker at the right moments of a fit, in a rehearsal and in a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_megatron.lightning.strategy.megatron import MegatronStrategy
from lightning_megatron.tools.rehearsal.context import PlaceLog, RunningPlace, Traffic
from lightning_megatron.tools.rehearsal.tracker import (
    GRADIENTS,
    MAIN_PARAMETERS,
    OPTIMIZER_STATE,
    PARAMETERS,
    StorageTracker,
)


class StepMeasure(Callback):
    """Figures of the steps of a fit.

    Args:
        tracker: bytes of all tensors.
        place: place of the program.
        first: number of the first step that counts for the peak.

    Attributes:
        setup_peak: most bytes before the first step.
        peak: most bytes in a step.
        peaks: most bytes in each step that counts.
        peak_without_pieces: most bytes without those that only a CPU's reduce-scatter receives.
        moment: name of the moment of ``peak``.
        by_cause: bytes at that moment, by cause.
        after_step: bytes after the last step.
        after_by_cause: those bytes by cause.
        traffic: collectives and messages of the last step.
    """

    reads_parameters = False

    def __init__(self, tracker: StorageTracker, place: RunningPlace, log: PlaceLog, first: int = 0) -> None:
        self._first = first
        self._tracker, self._place, self._log = tracker, place, log
        self.setup_peak = self.peak = self.peak_without_pieces = self.after_step = 0
        self.peaks: list[int] = []
        self.moment = ""
        self.by_cause: Mapping[str, int] = {}
        self.after_by_cause: Mapping[str, int] = {}
        self.traffic: Mapping[str, Mapping[str, Traffic]] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hook the modules, which are built by now."""
        self.setup_peak = self._tracker.peak
        self._place.follow_modules(pl_module)
        self._name_owned(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start measuring at the first batch of a step."""
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._tracker.restart()
            strategy = trainer.strategy
            assert isinstance(strategy, MegatronStrategy)
            self._log.take_traffic(strategy.mesh)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the figures of a step after its last batch."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        tracker, strategy = self._tracker, trainer.strategy
        assert isinstance(strategy, MegatronStrategy)
        step = batch_idx // trainer.accumulate_grad_batches
        if step >= self._first:
            self.peaks.append(tracker.peak)
            self.peak_without_pieces = max(self.peak_without_pieces, tracker.peak_without_pieces)
            if tracker.peak > self.peak:
                self.peak, self.moment, self.by_cause = tracker.peak, tracker.moment, tracker.peak_by_cause
        self._name_owned(trainer, pl_module)
        self.after_step = tracker.total
        self.after_by_cause = {cause: size for cause, size in tracker.by_cause.items() if size}
        self.traffic = self._log.take_traffic(strategy.mesh)

    def _name_owned(self, trainer: Trainer, module: LightningModule) -> None:
        """Set the cause of tensors that outlive a step."""
        strategy, name = trainer.strategy, self._tracker.name
        assert isinstance(strategy, MegatronStrategy)
        name(PARAMETERS, [*module.parameters(), *module.buffers()])
        for sharded in strategy.sharded_optimizers:
            owned = {id(buffer.params.untyped_storage()) for buffer in sharded.buffers}
            mains = [main for _, main, _ in sharded.updated_tensors()]
            name(PARAMETERS, [buffer.params for buffer in sharded.buffers])
            name(GRADIENTS, [buffer.grads for buffer in sharded.buffers])
            name(MAIN_PARAMETERS, [main for main in mains if id(main.untyped_storage()) not in owned])
            states = [v for state in sharded.state.values() for v in state.values() if isinstance(v, Tensor)]
            name(OPTIMIZER_STATE, states)
