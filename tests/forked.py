"""Children that a test forks. They have the locks of other threads as they were: with one that was held they hang."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess


def forked(act: Callable[[], object], patience: float = 60.0) -> int:
    """Exit code of a child that does something; minus the number of the signal that it died of.

    Args:
        act: what the child does.
        patience: seconds after which a child that hangs is killed and the test fails.
    """
    child = os.fork()
    if not child:
        try:
            act()
        finally:
            os._exit(0)
    deadline = time.monotonic() + patience
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise TimeoutError(f"a forked child has not ended in {patience:.0f} s")
        time.sleep(0.005)
    return os.waitstatus_to_exitcode(ended[1])


def join(process: BaseProcess, patience: float = 60.0) -> None:
    """Wait for the end of a process; kill one that hangs, which fails the test.

    Args:
        process: a process that was started.
        patience: seconds.
    """
    process.join(patience)
    if process.is_alive():
        process.kill()
        process.join()
        raise TimeoutError(f"{process.name} has not ended in {patience:.0f} s")
