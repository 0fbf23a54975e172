"""A strategy that looks at batches before they go to the device."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_megatron.lightning.batch_watch import BatchWatch
from lightning_megatron.lightning.checkpoint_strategy import CheckpointStrategy


class BatchStrategy(CheckpointStrategy):
    """Faults that a module finds in its batches end the run on all ranks."""

    _watch: BatchWatch | None = None

    def setup_environment(self) -> None:
        """Start anew: another run may stand on another mesh."""
        self._watch = None
        super().setup_environment()

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
