"""How a test learns the end of a child that it forks, and that one which hangs does not hold it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest

from tests.forked import forked, join


def test_the_end_of_a_child_is_told() -> None:
    assert forked(lambda: os._exit(3)) == 3
    assert forked(lambda: None) == 0
    assert forked(lambda: os.kill(os.getpid(), signal.SIGTERM)) == -signal.SIGTERM


def test_a_child_that_hangs_is_killed() -> None:
    with pytest.raises(TimeoutError, match="not ended in 0 s"):
        forked(lambda: time.sleep(600), patience=0.1)
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    process.start()
    with pytest.raises(TimeoutError, match="not ended in 0 s"):
        join(process, patience=0.1)
    assert process.exitcode == -signal.SIGKILL
