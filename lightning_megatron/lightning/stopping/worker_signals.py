"""The end of DataLoader workers: after a signal to all processes of a job, and after the death of their rank."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.util import Finalize
from types import FrameType

from torch.utils.data import DataLoader


@dataclass(frozen=True)
class PatientWorker:
    """``worker_init_fn`` of a worker that outlives signals to the job: its rank's last steps need its batches.

    It ends at the second SIGTERM, since a rank that exits sends two. A worker whose rank has died ends itself, even in
    the middle of a sample, where torch does not check for the rank.

    Attributes:
        then: the user's ``worker_init_fn``.
    """

    then: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        """Run in the worker, at its start."""
        for name in ("SIGINT", "SIGUSR1"):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _wait_for_another)
        threading.Thread(target=_end_with_the_rank, name="end-with-the-rank", daemon=True).start()
        if self.then is not None:
            self.then(worker)


def _wait_for_another(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)


def _end_with_the_rank() -> None:
    rank = multiprocessing.parent_process()
    if rank is not None:
        rank.join()
        os._exit(1)


def let_workers_outlive_signals(loader: object) -> None:
    """Start the workers of a loader, if it is a ``DataLoader`` that has some, with :class:`PatientWorker`."""
    if isinstance(loader, DataLoader) and loader.num_workers and not isinstance(loader.worker_init_fn, PatientWorker):
        loader.worker_init_fn = PatientWorker(loader.worker_init_fn)
        # Python sends daemonic children one SIGTERM when a process exits, and waits. torch sends another before, unless
        # an exception still holds its iterator: then workers would wait for their rank, and it for them.
        Finalize(None, _end_daemons, exitpriority=100)


def _end_daemons() -> None:
    children = [child for child in multiprocessing.active_children() if child.daemon]
    for seconds in (0.2, 1.0):  # two signals at once would be one
        for child in children:
            child.terminate()
        for child in children:
            child.join(seconds)
