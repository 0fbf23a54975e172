"""Callback that writes a Chrome trace of a few steps, of host and device."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.profiler import record_function

from lightning_megatron.arguments import Check, checked
from lightning_megatron.device import profiler_of, synchronize
from lightning_megatron.errors import Problem


def _step_problems(steps: Any) -> list[Problem]:
    if len(steps) == 2 and 1 <= steps[0] <= steps[1]:
        return []
    return [Problem("steps", steps, "must be a first and a last step, from 1 on", ((10, 12),))]


class DeviceProfiler(Callback):
    """Chrome trace of some steps, one file a rank: ``rank0-steps10-12.pt.trace.json``.

    The host is traced, and the device with it: CUDA, or Gaudi, which Lightning's ``PyTorchProfiler`` does not know.
    Each batch is a range named by its step. Open a file in https://ui.perfetto.dev, or the folder in TensorBoard.
    A file gets its name once it is complete.

    Args:
        steps: first and last optimizer step of the trace, counted from 1. Early steps compile: leave them out.
        dirpath: folder of the files; ``None`` for ``traces`` in the folder of the logger, or of the Trainer.

    Attributes:
        file: this rank's trace; ``None`` until it is written.
    """

    reads_parameters = False

    @checked(steps=Check(_step_problems))
    def __init__(self, steps: tuple[int, int] = (10, 12), dirpath: str | Path | None = None) -> None:
        self._first, self._last = steps
        self._folder = None if dirpath is None else Path(dirpath)
        self._profiler: Any = None
        self._bracket: AbstractContextManager[Any] | None = None
        self.file: Path | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Choose the folder; all ranks read ``trainer.log_dir``, which communicates."""
        if self._folder is None:
            self._folder = Path(trainer.log_dir or trainer.default_root_dir) / "traces"

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the trace before its first step, and name each batch."""
        step = trainer.global_step + 1
        if self._profiler is None and self.file is None and self._first <= step <= self._last:
            synchronize(trainer.strategy.root_device)  # keeps work of earlier steps out of the trace
            self._profiler = profiler_of(trainer.strategy.root_device)
            self._profiler.start()
        if self._profiler is not None:
            self._bracket = record_function(f"step {step}, batch {batch_idx}")
            self._bracket.__enter__()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write the trace after the last step."""
        self._end_batch()
        if self._profiler is not None and trainer.global_step >= self._last:
            self._write(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write a trace that is shorter than asked for; warn if there is none."""
        if self._profiler is not None:
            self._write(trainer)
        elif self.file is None:
            rank_zero_warn(
                f"{type(self).__name__} wrote no trace: training ended at step {trainer.global_step}, and"
                f" steps={(self._first, self._last)} did not begin in it"
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop the trace without writing a file."""
        self._end_batch()
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()

    def _end_batch(self) -> None:
        bracket, self._bracket = self._bracket, None
        if bracket is not None:
            bracket.__exit__(None, None, None)

    def _write(self, trainer: Trainer) -> None:
        assert self._folder is not None
        synchronize(trainer.strategy.root_device)
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"rank{trainer.global_rank}-steps{self._first}-{self._last}.pt.trace.json"
        unfinished = self._folder / f".{os.getpid()}-{name}"
        profiler.export_chrome_trace(str(unfinished))
        self.file = unfinished.replace(self._folder / name)
        rank_zero_info(f"trace of steps {self._first} to {self._last}: {self.file}")
