"""Trials of batch sizes, for which some ranks may have too little memory: all ranks end such a trial together.

Lightning's search for a batch size trains with larger and larger batches until one is out of memory. With several
replicas one rank may be out of memory and the others not, which would wait for it in their next collective. So during a
trial all ranks agree before each collective; a rank that is out of memory votes at once, and all raise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.utilities.memory import is_oom_error

from lightning_megatron import device as devices
from lightning_megatron.comm.collectives import all_reduce_max
from lightning_megatron.errors import described
from lightning_megatron.mesh import ParallelMesh

_NO_CONTEXT = nullcontext()


class TrialOutOfMemoryError(torch.OutOfMemoryError):
    """A rank has too little memory for the batch size of a trial; all ranks raise it."""


class MemoryTrials:
    """Agreement of ranks, each of which holds a whole model, on the trials of a search for a batch size."""

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._mesh: ParallelMesh | None = None

    def begin(self, trainer: Trainer | None, mesh: ParallelMesh) -> None:
        """Begin a run."""
        callbacks = [] if trainer is None else trainer.callbacks  # type: ignore[attr-defined]
        searches = any(isinstance(callback, BatchSizeFinder) for callback in callbacks)
        self._trainer, self._mesh = trainer if searches else None, mesh

    @property
    def is_on(self) -> bool:
        """True during a search, for which Lightning takes all callbacks away."""
        return self._trainer is not None and not self._trainer.callbacks  # type: ignore[attr-defined]

    def agree(self, error: RuntimeError | None = None) -> None:
        """Agree that no rank is out of memory; called before a collective, by all ranks.

        Args:
            error: error of this rank.

        Raises:
            TrialOutOfMemoryError: on all ranks, in a trial that is too large for any of them.
        """
        if self._trainer is None or not self.is_on:
            return
        assert self._mesh is not None
        rank = self._mesh.rank
        worst = int(all_reduce_max(torch.tensor(-1 if error is None else rank), self._mesh.host))
        if worst >= 0:
            own = "" if error is None else f" (rank {rank}: {described(error)})"
            # Lightning's search looks for these words of CUDA's, on every kind of device.
            raise TrialOutOfMemoryError(f"CUDA or another device is out of memory on rank {worst}{own}") from error

    def part(self, inner: AbstractContextManager[None] = _NO_CONTEXT) -> AbstractContextManager[None]:
        """Context of a part of a trial that may be out of memory, on one rank or on several, around another context.

        Raises:
            TrialOutOfMemoryError: as :meth:`agree`.
        """
        return inner if self._trainer is None else self._part(inner)

    @contextmanager
    def _part(self, inner: AbstractContextManager[None]) -> Iterator[None]:
        try:
            with inner:
                yield
        except RuntimeError as error:
            if not self.is_on or not _is_news(error):
                raise
            self.agree(error)

    def step(self) -> AbstractContextManager[None]:
        """Context of an optimizer step, in which no smaller batch would help, and ranks are amid collectives.

        Raises:
            RuntimeError: if this rank is out of memory in a trial of several ranks.
        """
        return _NO_CONTEXT if self._trainer is None else self._step()

    @contextmanager
    def _step(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            alone = self._mesh is None or not self._mesh.is_distributed
            if alone or not self.is_on or not _is_news(error):
                raise
            raise RuntimeError("the optimizer's step does not fit the device's memory, with any batch size") from error


def _is_news(error: RuntimeError) -> bool:
    """True if this rank is out of memory, and the others do not know it yet."""
    is_known = isinstance(error, TrialOutOfMemoryError)
    return not is_known and (is_oom_error(error) or devices.is_out_of_memory(error))
