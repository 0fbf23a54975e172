"""A strategy that looks at batches before they go to the device, and at whether all ranks have another one."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from lightning_megatron.lightning.strategy.checkpoints import CheckpointStrategy
from lightning_megatron.lightning.streams import EvaluationWatch, TrainingWatch
from lightning_megatron.lightning.streams.batch_watch import BatchWatch


class BatchStrategy(CheckpointStrategy):
    """Faults that a module finds in its batches, and data that end on some ranks only, end the run on all ranks."""

    _watch: BatchWatch | None = None
    _stream_watches: Sequence[Callback] = ()

    def setup_environment(self) -> None:
        """Start anew: another run may stand on another mesh."""
        self._watch = None
        super().setup_environment()

    def _watch_streams(self, trainer: Trainer | None) -> None:
        """Let data be watched over, before any other callback is called."""
        if trainer is not None:
            self._stream_watches = (TrainingWatch(self.mesh), EvaluationWatch(self.mesh, self._timeout))
            trainer.callbacks[:0] = self._stream_watches  # type: ignore[attr-defined]

    def _end_run(self) -> None:
        if self._stream_watches and self.lightning_module is not None:
            callbacks: list[Callback] = self.lightning_module.trainer.callbacks  # type: ignore[attr-defined]
            callbacks[:] = [callback for callback in callbacks if callback not in self._stream_watches]
        self._stream_watches = ()
        super()._end_run()

    @property
    def _batches(self) -> BatchWatch:
        if self._watch is None:
            self._watch = BatchWatch(self.mesh)
        return self._watch

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Look at a batch while it is on the host, then move it.

        Raises:
            DataError: for a fault that all ranks have seen.
        """
        batch = self._batches.look(self.lightning_module, batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    @contextmanager
    def watching_batches(self) -> Generator[None, None, None]:
        """A training step, which all ranks take: what is wrong with anybody's batch is an error at its end.

        Raises:
            DataError: on all ranks.
        """
        self._batches.begin(self.lightning_module)
        yield
        self._batches.settle()

    def _settle_evaluation(self) -> None:
        """Replicas may have different numbers of batches: they meet when all are through."""
        with self.watching_batches():
            pass

    def on_validation_end(self) -> None:
        """Raise what was wrong with a batch, on all ranks."""
        self._settle_evaluation()
        super().on_validation_end()

    def on_test_end(self) -> None:
        """Raise what was wrong with a batch, on all ranks."""
        self._settle_evaluation()
        super().on_test_end()

    def on_predict_end(self) -> None:
        """Raise what was wrong with a batch, on all ranks."""
        self._settle_evaluation()
        super().on_predict_end()
