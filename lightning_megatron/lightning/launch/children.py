"""Processes that a launcher has started: watched for failures, and ended when the job fails."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from lightning_megatron.recorder.process import ProcessState, inspect_process

_log = logging.getLogger(__name__)

EVERY = 0.2
"""Seconds between two checks."""
GRACE = 3.5
"""Seconds that a process has to end by itself once the job has failed, so that it can log its error."""
LAST_WORD = 0.5
"""Seconds between SIGTERM, which a process may delay, and SIGKILL, which also ends a stopped process."""


class Children:
    """Ranks that this process has launched.

    If one fails, the launching rank has a few seconds to notice it in a collective and log it; then all are ended.

    Args:
        processes: processes of local ranks 1, 2, and so on.
        first_rank: global rank of the launching process.
    """

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], first_rank: int) -> None:
        self._processes, self._first = list(processes), first_rank
        self._ending = threading.Lock()
        self._are_ended = threading.Event()
        threading.Thread(target=self._watch, name="launched-ranks", daemon=True).start()

    @property
    def failed(self) -> dict[int, int]:
        """Exit status of failed processes, by global rank, negative for a signal."""
        return {self._first + n: p.returncode for n, p in enumerate(self._processes, 1) if p.returncode}

    def send(self, number: int) -> None:
        """Send a signal to all running processes."""
        for process in self._processes:
            process.send_signal(number)

    def let_end(self) -> None:
        """Let the processes end by themselves, since all ranks have failed together: stop watching for failures."""
        self._are_ended.set()

    def end(self, grace: float = GRACE) -> list[int]:
        """End the processes that do not end by themselves within ``grace`` seconds, and return their ranks."""
        self._are_ended.set()
        with self._ending:
            if self._wait(grace):
                return []
            left = [self._first + n for n, process in enumerate(self._processes, 1) if process.poll() is None]
            self.send(signal.SIGTERM)
            if not self._wait(LAST_WORD):
                self.send(signal.SIGKILL)
                for process in self._processes:
                    with suppress(subprocess.TimeoutExpired):  # a process inside a driver call may not die
                        process.wait(LAST_WORD)
            return left

    def _wait(self, seconds: float) -> bool:
        """Wait until all have ended, or the remaining ones are stopped; True if all have ended."""
        end = time.monotonic() + seconds
        while any(process.poll() is None for process in self._processes):
            left = [process.pid for process in self._processes if process.returncode is None]
            if time.monotonic() > end or all(inspect_process(pid, 0).state == ProcessState.STOPPED for pid in left):
                return False
            time.sleep(0.02)
        return True

    def _watch(self) -> None:
        """Watch the processes. One that fails ends the job, as with Lightning's launcher, but is logged first."""
        while any(process.poll() is None for process in self._processes):
            if self.failed:
                break
            time.sleep(EVERY)
        if not self.failed:
            return
        if self._are_ended.wait(GRACE + LAST_WORD):
            return  # this process has noticed it in a collective
        told = ", ".join(f"rank {rank}: {status}" for rank, status in self.failed.items())
        _log.error("launched processes have failed (exit status of %s); all others are ended", told)
        self.send(signal.SIGKILL)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.kill(os.getpid(), signal.SIGKILL)
