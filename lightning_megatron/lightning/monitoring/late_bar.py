"""A metric of each step in the progress bar, for which no step waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_megatron.device import CPU, begin_read
from lightning_megatron.mesh import Axis
from lightning_megatron.recorder.file_format import Kind


class LateBar(Callback):
    """Shows the metric that a module names in ``shown_late``: on an accelerator its value of the step before.

    With ``prog_bar=True``, Lightning reads a metric at the end of each step, with or without a bar.
    """

    reads_parameters = False

    def __init__(self, world: Axis) -> None:
        self._world = world
        self._read: Callable[[], list[float]] | None = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Show a value that is known by now."""
        metrics: Mapping[str, Any] = trainer.callback_metrics
        value = metrics.get(_name(pl_module))
        if value is not None:
            before, self._read = self._read, begin_read(value.reshape(1))
            self._show(trainer, pl_module, self._read if before is None or value.device.type == CPU.type else before)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the last value."""
        if self._read is not None:
            self._show(trainer, pl_module, self._read)

    def _show(self, trainer: Trainer, module: LightningModule, read: Callable[[], list[float]]) -> None:
        with self._world.during(Kind.DEVICE):
            (trainer.progress_bar_metrics[_name(module)],) = read()


def _name(module: LightningModule) -> str:
    return str(getattr(module, "shown_late", ""))
