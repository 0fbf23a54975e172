"""Workers of a DataLoader where a signal goes to all processes of a job: a terminal's Ctrl-C, Slurm's scancel."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from torch.utils.data import DataLoader


@dataclass(frozen=True)
class PatientWorker:
    """Start of a worker that leaves it to its rank when to end: the rank's last steps need its batches.

    Of two SIGTERMs the second one counts: torch sends one to a worker that does not end when it should, and Python
    another when the rank exits.

    Attributes:
        then: what else is to be called at the start; the user's.
    """

    then: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        """Run in the worker, at its start."""
        for name in ("SIGINT", "SIGUSR1"):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _wait_for_another)
        if self.then is not None:
            self.then(worker)


def _wait_for_another(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)


def let_workers_outlive_signals(loader: object) -> None:
    """Have the workers of a loader started so.

    Args:
        loader: anything; only a ``DataLoader`` with workers is changed.
    """
    if isinstance(loader, DataLoader) and loader.num_workers and not isinstance(loader.worker_init_fn, PatientWorker):
        loader.worker_init_fn = PatientWorker(loader.worker_init_fn)
