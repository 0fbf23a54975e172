"""Looking at the other ranks of a job: who is to blame for a collective that fails, and an end to waiting in vain.

The files of all ranks are the channel: a rank that is dead, stopped or stuck need not answer. On one host they are
shared memory; between hosts they are as fresh as the file system makes them that the ranks share.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lightning_megatron.recorder.diagnosis import Diagnosis, diagnose
from lightning_megatron.recorder.file_format import State
from lightning_megatron.recorder.process import Process, ProcessState
from lightning_megatron.recorder.reading import FailureProbe, RankView, read_run
from lightning_megatron.recorder.recorder import Recorder, note_process_state
from lightning_megatron.recorder.table import render

_log = logging.getLogger(__name__)

EVERY = 1.0
"""Seconds between two looks at the others; half of it once something is wrong."""
SETTLES = 1.0
"""Seconds that a rank which has lost another waits until that is seen to be dead."""
GRACE = 2.0
"""Seconds that a process has to end by itself once its job has failed."""
LATE = 2.0
"""Seconds over the timeout after which the backend itself has missed it."""


class PeerWatch:
    """One rank's eye on the others.

    Args:
        recorder: its own, with an open file.
        rank: its own.
        others: ranks to look at all the time: those of this host, and a few beyond.
        timeout: seconds, of collectives.
        ends: ends this process by force where it waits for ranks that have failed; else it is left to itself.
        before_end: called first: ends processes that this one has launched.
        children: exit status of launched ranks that have failed, negative for a signal.
    """

    def __init__(
        self,
        recorder: Recorder,
        rank: int,
        others: Iterable[int],
        timeout: float,
        ends: bool,
        before_end: Callable[[], None],
        children: Callable[[], Mapping[int, int]],
    ) -> None:
        assert recorder.folder is not None
        self._recorder, self._rank, self._timeout, self._ends = recorder, rank, timeout, ends
        self._folder: Path = recorder.folder
        self._others = {other: FailureProbe(self._folder, other) for other in others if other != rank}
        self._before_end, self._children = before_end, children
        self._patience = GRACE
        self._over = threading.Event()
        self._reporting = threading.Lock()
        self._has_reported = False
        self._thread: threading.Thread | None = None
        recorder.blame = self.blame

    def start(self) -> None:
        """Begin to look, where it is for this to end the process."""
        if self._ends:
            self._thread = threading.Thread(target=self._look, name="peer-watch", daemon=True)
            self._thread.start()

    def give_time(self, seconds: float) -> None:
        """Let the main thread take longer to end by itself, since it knows, and ends others."""
        self._patience = GRACE + seconds

    def stop(self) -> None:
        """End of the run."""
        self._over.set()
        self._recorder.blame = None
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5)

    def views(self) -> list[RankView]:
        """All ranks as they are now."""
        dead = self._children()
        found = read_run(self._folder)
        return [
            replace(view, process=Process(ProcessState.DEAD, dead[view.rank]))
            if view.rank in dead and view.process.state != ProcessState.ENDED_BY_LAUNCHER
            else view
            for view in found
        ]

    def blame(self, doing: str) -> str:
        """Report who is to blame for a collective that has failed; the text is that of the error.

        Args:
            doing: what this rank waited in.
        """
        self._recorder.set_state(State.LOST, doing)
        end = time.monotonic() + SETTLES
        while True:
            views = self.views()
            diagnosis = diagnose(views)
            if diagnosis.is_fact or time.monotonic() > end:
                break
            time.sleep(0.05)
        self.report(views, diagnosis)
        return f"{doing}: {diagnosis.reason or 'no other rank is seen to be dead, stopped or behind'}"

    def report(self, views: Sequence[RankView], diagnosis: Diagnosis) -> None:
        """Print the table on the lowest surviving rank, a line on the others; once."""
        with self._reporting:
            if self._has_reported:
                return
            self._has_reported = True
        for rank in diagnosis.culprits:
            process = next(view.process for view in views if view.rank == rank)
            if process.state != ProcessState.RUNNING:
                note_process_state(self._folder, rank, int(process.state), process.status or 0)
        own = next((view for view in views if view.rank == self._rank), None)
        survivors = [v.rank for v in views if (v.is_alive or v is own) and v.rank not in diagnosis.culprits]
        if self._rank == min(survivors, default=self._rank):
            text = render(views, diagnosis, time.time_ns())
            _log.error("Rank %d has lost its job.\n%s\nActions of all ranks: %s", self._rank, text, self._folder)
        else:
            _log.error("Rank %d has lost its job: %s", self._rank, diagnosis.reason or "nobody stands out")

    def _look(self) -> None:
        trouble: float | None = None
        while not self._over.wait(EVERY if trouble is None else EVERY / 2):
            self._recorder.beat()
            reason, patience = self._trouble()
            if reason is None:
                trouble = None
                continue
            trouble = time.monotonic() if trouble is None else trouble
            if time.monotonic() - trouble >= patience and not self._over.is_set():
                self._end(reason)

    def _trouble(self) -> tuple[str | None, float]:
        """The reason for which this rank cannot go on, if any, and the seconds that it has to find out by itself."""
        if self._recorder.state == State.RAISED:
            return None, 0.0  # its own hooks may take their time
        if self._recorder.state == State.LOST:
            return f"rank {self._rank} has lost a peer", self._patience
        for rank, probe in self._others.items():
            if probe.has_failed():
                return f"rank {rank} has failed", self._patience
        since = self._recorder.main.waiting_since
        if since and time.time_ns() - since > (self._timeout + LATE) * 1e9:
            return f"what it waits for has not come in {self._timeout:.0f} s", 0.0
        return None, 0.0

    def _end(self, reason: str) -> None:
        """End this process: its main thread waits for what does not come, or runs code that does not know."""
        self._recorder.set_state(State.LOST, reason)
        views = self.views()
        self.report(views, diagnose(views))
        print(f"Rank {self._rank} is ended, since {reason}; it was here:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        self._before_end()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)
