"""Watchdog thread of each rank: it names the rank to blame for a failed collective, and ends a rank that waits in vain.

Ranks only read each other's files, so a rank that is dead, stopped or stuck need not answer. On one host the files are
shared memory; between hosts they are as recent as the shared file system makes them.

Reading files of other hosts loads that file system, so it is bounded: see ``REMOTE``, ``REMOTE_WAITING`` and ``MANY``.
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

from lightning_megatron.recorder.diagnosis import Diagnosis, diagnose, unmet
from lightning_megatron.recorder.file_format import State
from lightning_megatron.recorder.process import Process, ProcessState
from lightning_megatron.recorder.reading import FailureProbe, RankView, read_run
from lightning_megatron.recorder.recorder import Recorder, note_process_state
from lightning_megatron.recorder.table import render

_log = logging.getLogger(__name__)

EVERY = 1.0
"""Seconds between two checks of the other ranks; half of it once one has failed."""
LATE = 1.0
"""Seconds that the backend has after the timeout to raise its error; then this thread ends the process."""
GRACE = 2.0
"""Seconds that a process has to end by itself once its job has failed."""
SETTLES = 1.0
"""Most seconds that a rank which has lost a peer waits for the system to show that the peer is dead or stopped."""
LONG = 3.0
"""Seconds of waiting for others after which a rank checks more files of other hosts."""
AGAIN = 10.0
"""Least seconds between two searches for ranks that keep the device of an inactive rank waiting."""
ENDING = 600.0
"""Most seconds for the hooks and teardown of a rank that has raised an error; less if the timeout is shorter."""
REMOTE = 2
"""Files of other hosts that are read at each check, in turn."""
REMOTE_WAITING = 16
"""Files of other hosts that are read at each check while this rank has been waiting for longer than ``LONG``."""
MANY = 64
"""Ranks of a job that together read so many files. Those of a larger job read no more: each reads at fewer checks."""


class PeerWatch:
    """Watch the other ranks of a job.

    Every check reads the files of all ranks on this host, and of a few ranks on other hosts in turn. A rank that sees
    another fail ends too, and the ranks that watch it see that. So a failure spreads to all hosts.

    A job ends within ``LATE + EVERY + GRACE + EVERY / 2`` seconds after the timeout of a collective: a waiting rank is
    ended after ``LATE``; the others see that at their next check, have ``GRACE`` seconds, and check once more.

    Args:
        recorder: recorder of this rank, with an open file.
        rank: this rank.
        local: ranks of this host.
        world_size: ranks of the job.
        timeout: timeout of collectives, in seconds.
        before_end: function to call before this process is ended; it ends the processes that this one has launched.
        children: function that returns the exit status of each launched rank that failed, negative for a signal.
        launcher: id of the parent process without which this one is to end; ``None`` if it may outlive its parent.
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
        launcher: int | None = None,
    ) -> None:
        assert recorder.folder is not None
        self._recorder, self._rank, self._timeout = recorder, rank, timeout
        self._folder: Path = recorder.folder
        self._local = [FailureProbe(self._folder, other) for other in local if other != rank]
        # Each rank begins with its successor, so that ranks read different files at a time.
        others = ((rank + distance) % world_size for distance in range(1, world_size))
        self._remote = deque(FailureProbe(self._folder, other) for other in others if other not in local)
        self._share = min(1.0, MANY / world_size)
        self._turns = rank * self._share % 1  # ranks of a large job have theirs at different checks
        self._failed: FailureProbe | None = None
        self._before_end, self._children, self._launcher = before_end, children, launcher
        self._looked = 0.0
        self._patience = GRACE
        self._over = threading.Event()
        self._reporting = threading.Lock()
        self._has_reported = False
        self._thread: threading.Thread | None = None
        recorder.blame = self.blame

    def start(self) -> None:
        """Start the thread. It ends this process by force if the process does not end after a failure of any rank."""
        self._thread = threading.Thread(target=self._look, name="peer-watch", daemon=True)
        self._thread.start()

    def give_time(self, seconds: float) -> None:
        """Give the main thread more time to end by itself: it has seen the failure and is ending other ranks."""
        self._patience = GRACE + seconds

    def stop(self) -> None:
        """Stop the thread at the end of the run."""
        self._over.set()
        self._recorder.blame = None
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5)
        for probe in (*self._local, *self._remote):
            probe.close()

    def views(self) -> list[RankView]:
        """Read every file of the run, and return the present views of all ranks."""
        dead = self._children()
        views = read_run(self._folder)
        for view in views:
            if view.rank in dead and view.process.state != ProcessState.ENDED_BY_LAUNCHER:
                views[view.rank] = replace(view, process=Process(ProcessState.DEAD, dead[view.rank]))
        return views

    def blame(self, doing: str) -> str:
        """Report the rank to blame for a failed action, and return the text of the error."""
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
        return f"{doing}: {diagnosis.reason or 'found no other rank that is dead, stopped or behind'}"

    def report(self, views: Sequence[RankView], diagnosis: Diagnosis) -> None:
        """Log the table on the lowest surviving rank, one line on the others or if the culprit raised; only once."""
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
            _log.error("Rank %d: the job has failed: %s", self._rank, diagnosis.reason or "no rank stands out")
            return
        text = render(views, diagnosis, time.time_ns())
        has_raised = any(view.state == State.RAISED for view in culprits[:1])  # and prints its error
        text = f" {text.splitlines()[0]}; actions" if has_raised else f"\n{text}\nActions"
        _log.error("Rank %d: the job has failed.%s of all ranks: %s", self._rank, text, self._folder)

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
            elif not self._has_reported:  # report now: another process may end this one at any time
                self._report_fact()
            if time.monotonic() - trouble >= patience and not self._over.is_set():
                self._end(reason)

    def _pause(self, has_trouble: bool) -> float:
        """Seconds until the next check; less if the running collective should have timed out before that."""
        pause = EVERY / 2 if has_trouble else EVERY
        left = self._timeout + LATE - self._waited
        return min(pause, left) if self._waited and left > 0 else pause

    @property
    def _waited(self) -> float:
        """Seconds for which the main thread has been waiting for other ranks; 0 if it does not wait."""
        since = self._recorder.main.waiting_since
        return (time.time_ns() - since) / 1e9 if since else 0.0

    def _trouble(self) -> tuple[str | None, float]:
        """Reason to end this rank, if any, and the seconds that it has to end by itself."""
        if self._recorder.state == State.RAISED:  # its hooks and teardown may take as long as a collective
            patience = min(self._timeout, ENDING)
            if (time.time_ns() - self._recorder.state_since) / 1e9 > patience:
                return f"it raised an error {patience:.0f} s ago and has not ended yet", 0.0
            return None, 0.0
        if self._recorder.state == State.LOST:
            return f"rank {self._rank} has lost a peer", self._patience
        if (failed := self._failed_peer()) is not None:
            return f"rank {failed.rank} has failed", self._patience
        if self._launcher not in (None, os.getppid()):
            return f"process {self._launcher}, which launched it, has ended", self._patience
        if self._waited > self._timeout + LATE or self._waits_unseen():
            return f"other ranks have kept it waiting for more than {self._timeout:.0f} s", 0.0
        return None, 0.0

    def _waits_unseen(self) -> bool:
        """True if this rank has been inactive for too long, while others have not come to what it has started.

        Its host then waits for the device outside of a recorded action, such as in a progress bar.
        """
        idle, now = (time.time_ns() - self._recorder.main.active) / 1e9, time.monotonic()
        if idle < self._timeout + LATE or now - self._looked < AGAIN:
            return False
        self._looked = now
        by_rank = {view.rank: view for view in self.views()}
        own = by_rank.get(self._rank)
        return own is not None and own.runs_ahead and bool(unmet(own, by_rank))

    def _failed_peer(self) -> FailureProbe | None:
        """First failed rank, if any, among those of this host and the next few of other hosts."""
        if self._failed is not None and self._failed.has_failed():
            return self._failed
        self._turns = self._turns % 1 + self._share * (REMOTE_WAITING if self._waited > LONG else REMOTE)
        count = int(self._turns)
        chosen = [*self._local, *islice(self._remote, count)]
        self._remote.rotate(-count)
        self._failed = next((probe for probe in chosen if probe.has_failed()), None)
        return self._failed

    def _end(self, reason: str) -> None:
        """End this process, whose main thread waits in vain or runs code that has not noticed the failure."""
        self._recorder.set_state(State.LOST, reason)
        views = self.views()
        self.report(views, diagnose(views))
        if self._failed is None:  # otherwise the stacks go to the folder that the report names
            print(f"Rank {self._rank} is ended, since {reason}; its stacks:", file=sys.stderr, flush=True)
        stack = self._folder / f"stack-of-rank-{self._rank}.txt"
        with suppress(OSError), nullcontext(sys.stderr) if self._failed is None else stack.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        self._before_end()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)
