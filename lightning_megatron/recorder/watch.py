"""A thread of each rank that watches the others: it names the rank to blame for a failed collective, and ends waits.

Ranks communicate through their files: a rank that is dead, stopped or stuck need not answer. On one host the files are
shared memory; between hosts they are as fresh as the shared file system makes them.

Reading files of other hosts loads that file system, so it is bounded: see ``REMOTE`` and ``REMOTE_WAITING``.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

from lightning_megatron.recorder.diagnosis import Diagnosis, diagnose
from lightning_megatron.recorder.file_format import State
from lightning_megatron.recorder.process import Process, ProcessState
from lightning_megatron.recorder.reading import FailureProbe, RankView, read_run
from lightning_megatron.recorder.recorder import Recorder, note_process_state
from lightning_megatron.recorder.table import render

_log = logging.getLogger(__name__)

EVERY = 1.0
"""Seconds between two looks at the other ranks; half of it once one has failed."""
LATE = 1.0
"""Seconds after the timeout by which the backend should have raised; then this watch ends the process."""
GRACE = 2.0
"""Seconds that a process has to end by itself once its job has failed."""
SETTLES = 1.0
"""Seconds that a rank which has lost a peer waits until the system shows why."""
LONG = 3.0
"""Seconds of waiting for others after which a rank looks at more files of other hosts."""
ENDING = 600.0
"""Most seconds that a rank which has raised an error has for its hooks; less if the timeout is shorter."""
REMOTE = 2
"""Files of other hosts that are read at each look, in turn."""
REMOTE_WAITING = 16
"""Files of other hosts that are read at each look while this rank has been waiting for longer than ``LONG``."""


class PeerWatch:
    """Watches the other ranks of a job for one rank.

    Every look reads the files of all ranks on this host, and of a few ranks on other hosts in turn. A rank that has
    seen another fail ends too, and those that watch it see that: so even the few files spread a failure to all hosts.

    From the timeout of a collective on, a job ends within ``LATE + EVERY + GRACE + EVERY / 2`` seconds: a rank that
    waits is ended after ``LATE``; the others see that at their next look, have their grace, and look once more.

    Args:
        recorder: recorder of this rank, with an open file.
        rank: this rank.
        local: ranks of this host.
        world_size: ranks of the job.
        timeout: timeout of collectives, in seconds.
        before_end: function called before this process is ended; it ends processes that this one has launched.
        children: function that gives the exit status of launched ranks that have failed, negative for a signal.
    """

    def __init__(
        self,
        recorder: Recorder,
        rank: int,
        local: Collection[int],
        world_size: int,
        timeout: float,
        before_end: Callable[[], None],
        children: Callable[[], Mapping[int, int]],
    ) -> None:
        assert recorder.folder is not None
        self._recorder, self._rank, self._timeout = recorder, rank, timeout
        self._folder: Path = recorder.folder
        self._local = [FailureProbe(self._folder, other) for other in local if other != rank]
        # Each rank begins with its successor, so that ranks read different files at a time.
        others = ((rank + distance) % world_size for distance in range(1, world_size))
        self._remote = deque(FailureProbe(self._folder, other) for other in others if other not in local)
        self._failed: FailureProbe | None = None
        self._before_end, self._children = before_end, children
        self._patience = GRACE
        self._over = threading.Event()
        self._reporting = threading.Lock()
        self._has_reported = False
        self._thread: threading.Thread | None = None
        recorder.blame = self.blame

    def start(self) -> None:
        """Start the thread, which ends this process by force when it waits for ranks that have failed."""
        self._thread = threading.Thread(target=self._look, name="peer-watch", daemon=True)
        self._thread.start()

    def give_time(self, seconds: float) -> None:
        """Give the main thread more time to end by itself, since it knows of the failure and is ending other ranks."""
        self._patience = GRACE + seconds

    def stop(self) -> None:
        """Stop the thread at the end of the run."""
        self._over.set()
        self._recorder.blame = None
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5)

    def views(self) -> list[RankView]:
        """Views of all ranks as they are now; reads every file of the run."""
        dead = self._children()
        views = read_run(self._folder)
        for view in views:
            if view.rank in dead and view.process.state != ProcessState.ENDED_BY_LAUNCHER:
                views[view.rank] = replace(view, process=Process(ProcessState.DEAD, dead[view.rank]))
        return views

    def blame(self, doing: str) -> str:
        """Report the rank to blame for a failed collective, and return the text of the error.

        Args:
            doing: description of what this rank waited in.
        """
        self._recorder.set_state(State.LOST, doing)
        begun = time.monotonic()
        while True:
            before = time.monotonic()
            views = self.views()
            diagnosis = diagnose(views)
            now = time.monotonic()
            if diagnosis.is_fact or now - begun > SETTLES:
                break
            time.sleep(max(0.05, now - before))
        self.report(views, diagnosis)
        return f"{doing}: {diagnosis.reason or 'no other rank is seen to be dead, stopped or behind'}"

    def report(self, views: Sequence[RankView], diagnosis: Diagnosis) -> None:
        """Print the table on the lowest surviving rank, and a line on others or after an error, once.

        Args:
            views: views of all ranks.
            diagnosis: diagnosis of them.
        """
        with self._reporting:
            if self._has_reported:
                return
            self._has_reported = True
        culprits = [view for rank in diagnosis.culprits for view in views if view.rank == rank]
        for view in culprits:
            if view.process.state != ProcessState.RUNNING:
                note_process_state(self._folder, view.rank, int(view.process.state), view.process.status or 0)
        survivors = {view.rank for view in views if view.is_alive or view.rank == self._rank}
        if self._rank != min(survivors - set(diagnosis.culprits), default=self._rank):
            _log.error("Rank %d has lost its job: %s", self._rank, diagnosis.reason or "nobody stands out")
            return
        text = render(views, diagnosis, time.time_ns())
        has_raised = any(view.state == State.RAISED for view in culprits[:1])  # and prints its error
        text = f" {text.splitlines()[0]}; actions" if has_raised else f"\n{text}\nActions"
        _log.error("Rank %d has lost its job.%s of all ranks: %s", self._rank, text, self._folder)

    def _report_fact(self) -> None:
        views = self.views()
        diagnosis = diagnose(views)
        if diagnosis.is_fact:
            self.report(views, diagnosis)

    def _look(self) -> None:
        trouble: float | None = None
        while not self._over.wait(self._pause(trouble is not None)):
            self._recorder.beat()
            reason, patience = self._trouble()
            if reason is None:
                trouble = None
                continue
            if trouble is None:
                trouble = time.monotonic()
            elif not self._has_reported:  # now, since this process may be ended by another one
                self._report_fact()
            if time.monotonic() - trouble >= patience and not self._over.is_set():
                self._end(reason)

    def _pause(self, has_trouble: bool) -> float:
        """Seconds to the next look: at the latest when a collective that is under way should have timed out."""
        pause = EVERY / 2 if has_trouble else EVERY
        left = self._timeout + LATE - self._waited
        return min(pause, left) if self._waited and left > 0 else pause

    @property
    def _waited(self) -> float:
        """Seconds for which the main thread has been waiting for other ranks; 0 if it does not wait."""
        since = self._recorder.main.waiting_since
        return (time.time_ns() - since) / 1e9 if since else 0.0

    def _trouble(self) -> tuple[str | None, float]:
        """Reason for which this rank cannot go on, if any, and the seconds that it has to find out by itself."""
        if self._recorder.state == State.RAISED:  # its hooks may take as long as a collective, but not hang
            patience = min(self._timeout, ENDING)
            if (time.time_ns() - self._recorder.state_since) / 1e9 > patience:
                return f"it raised an error {patience:.0f} s ago and has not ended yet", 0.0
            return None, 0.0
        if self._recorder.state == State.LOST:
            return f"rank {self._rank} has lost a peer", self._patience
        if (failed := self._failed_peer()) is not None:
            return f"rank {failed.rank} has failed", self._patience
        if self._waited > self._timeout + LATE:
            return f"what it waits for has not come in {self._timeout:.0f} s", 0.0
        return None, 0.0

    def _failed_peer(self) -> FailureProbe | None:
        """A rank that has failed: one of this host, or of the ranks of other hosts whose turn it is."""
        if self._failed is not None and self._failed.has_failed():
            return self._failed
        count = REMOTE_WAITING if self._waited > LONG else REMOTE
        chosen = [*self._local, *islice(self._remote, count)]
        self._remote.rotate(-count)
        self._failed = next((probe for probe in chosen if probe.has_failed()), None)
        return self._failed

    def _end(self, reason: str) -> None:
        """End this process: its main thread waits in vain, or runs code that does not know of the failure."""
        self._recorder.set_state(State.LOST, reason)
        views = self.views()
        self.report(views, diagnose(views))
        if self._failed is None:  # else the report has named the folder
            print(f"Rank {self._rank} is ended, since {reason}; it was here:", file=sys.stderr, flush=True)
        stack = self._folder / f"stack-of-rank-{self._rank}.txt"
        with suppress(OSError), nullcontext(sys.stderr) if self._failed is None else stack.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        self._before_end()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)
