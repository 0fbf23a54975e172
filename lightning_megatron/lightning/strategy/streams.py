"""Checks of the data of a run: of its batches before they go to the device, and of the ends of its loaders."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_megatron.lightning.compat._private import agree_to_validate
from lightning_megatron.lightning.streams import EvaluationWatch, TrainingWatch
from lightning_megatron.lightning.streams.batch_watch import BatchWatch
from lightning_megatron.mesh import ParallelMesh


class StreamChecks:
    """Faults that a module finds in its batches, and data that end on some ranks only, end the run on all ranks."""

    def __init__(self) -> None:
        self._batches: BatchWatch | None = None
        self._validated = 0.0

    def restart(self) -> None:
        """Forget the mesh: the next run may have another one."""
        self._batches = None

    def callbacks(self, mesh: ParallelMesh, timeout: timedelta) -> list[Callback]:
        """Callbacks that watch the loaders."""
        watch = self._watch(mesh)
        return [TrainingWatch(mesh, watch), EvaluationWatch(mesh, timeout, watch)]

    def _watch(self, mesh: ParallelMesh) -> BatchWatch:
        if self._batches is None:
            self._batches = BatchWatch(mesh)
        return self._batches

    def look(self, module: LightningModule | None, batch: Any, mesh: ParallelMesh, loader: int) -> Any:
        """Check a batch while it is on the host.

        Raises:
            DataError: for a fault that all ranks have seen.
        """
        return self._watch(mesh).look(module, batch, loader)

    def agree_to_validate(self, trainer: Trainer, mesh: ParallelMesh) -> None:
        """Agree before a step if a validation by time follows it."""
        if mesh.is_distributed:
            self._validated = agree_to_validate(trainer, self._validated)

    @contextmanager
    def step(self, module: LightningModule | None, mesh: ParallelMesh) -> Generator[None, None, None]:
        """Bracket a training step, which all ranks take: a fault in the batch of any rank is raised at its end.

        Raises:
            DataError: on all ranks.
        """
        self._watch(mesh).begin(module)
        yield
        self._watch(mesh).settle()

    def end_evaluation(self, module: LightningModule | None, mesh: ParallelMesh) -> None:
        """Raise the faults of an evaluation: replicas may have different numbers of batches, and meet at the end.

        Raises:
            DataError: on all ranks.
        """
        with self.step(module, mesh):
            pass
