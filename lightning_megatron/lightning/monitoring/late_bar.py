"""A metric of each step in the progress bar, for which no step waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_megatron.device import CPU, begin_read
from lightning_megatron.lightning.compat.skipped_hooks import skip
from lightning_megatron.mesh import Axis
from lightning_megatron.recorder.file_format import Kind


class LateBar(Callback):
    """Shows the metric that a module names in ``shown_late``: on an accelerator its value of the step before.

    With ``prog_bar=True``, Lightning reads a metric at the end of each step, with or without a bar.
    """

    reads_parameters = False

    def __init__(self, world: Axis) -> None:
        self._world, self._name = world, ""
        self._read: Callable[[], list[float]] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look if the module names a metric."""
        self._name = getattr(pl_module, "shown_late", "")
        if not self._name:
            skip(self, "on_train_batch_end")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any) -> None:
        """Show a value that is known by now."""
        value = trainer.callback_metrics.get(self._name)
        if value is not None:
            before, self._read = self._read, begin_read(value.reshape(1))
            self._show(trainer, self._read if before is None or value.device.type == CPU.type else before)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the last value."""
        self._show(trainer, self._read)

    def _show(self, trainer: Trainer, read: Callable[[], list[float]] | None) -> None:
        if read is not None:
            with self._world.during(Kind.DEVICE):
                (trainer.progress_bar_metrics[self._name],) = read()
