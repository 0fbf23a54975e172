from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from patience import PATIENCE

from lightning_megatron.testing import workers
from lightning_megatron.testing.workers import WorkerError, WorkerPool, WorkerTimeoutError


def sum_of_ranks() -> tuple[int, int, float]:
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    return dist.get_rank(), dist.get_world_size(), x.item()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError(f"only rank {rank}")
    dist.barrier()


def hang_on(rank: int, hangs: Path) -> None:
    if dist.get_rank() == rank:
        hangs.touch()
        time.sleep(600)


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def hang_in_leaving(rank: int) -> int:
    if dist.get_rank() == rank:
        dist.destroy_process_group = lambda: time.sleep(600)  # in a worker that will not see another call
    return os.getpid()


def be_deaf() -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return os.getpid()


def process_id() -> int:
    return os.getpid()


def test_every_rank_runs_in_a_group_of_the_asked_size(ranks):
    for n in (1, 4, 2):
        assert ranks(n, sum_of_ranks) == [(r, n, sum(range(n))) for r in range(n)]


def test_processes_are_reused(ranks):
    assert ranks(2, process_id) == ranks(2, process_id)


def test_a_failure_names_its_rank_and_cause_and_the_pool_lives_on(ranks):
    with pytest.raises(WorkerError, match="rank 1 raised") as caught:
        ranks(2, fail_on, 1)
    assert isinstance(caught.value.__cause__, KeyError)
    assert "only rank 1" in str(caught.value)
    assert ranks(2, sum_of_ranks)[1] == (1, 2, 1.0)


def test_a_hang_ends_with_the_stack_of_the_rank_that_hangs(tmp_path, monkeypatch):
    hangs = tmp_path / "hangs"

    def time_is_up(unheard: list[Connection], timeout: float) -> list[Any]:
        """Nothing more comes once rank 0 has answered and rank 1 hangs, however long that takes."""
        if len(unheard) == 2:
            return wait(unheard)
        while not hangs.exists():
            time.sleep(0.01)
        return []

    with WorkerPool(2) as pool:
        monkeypatch.setattr(workers, "wait", time_is_up)
        with pytest.raises(WorkerTimeoutError, match=r"ranks \[1\]") as caught:
            pool.run(2, hang_on, 1, hangs)
        assert "hang_on" in str(caught.value)
        monkeypatch.undo()
        assert pool.run(2, sum_of_ranks)[0] == (0, 2, 1.0)


def test_a_dead_worker_is_reported_with_its_exit_code():
    with WorkerPool(2) as pool, pytest.raises(WorkerError, match=r"rank 1 .*\n.*exit code 7"):
        pool.run(2, die_on, 1)


def is_alive(process_id: int) -> bool:
    """True if it still runs; a zombie does not."""
    try:
        status = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def test_a_group_that_is_never_left_costs_no_answer_and_leaves_no_process():
    with WorkerPool(2) as pool:
        before = pool.run(2, process_id)
        pool.grace = 1.5
        assert pool.run(2, hang_in_leaving, 1) == before
        assert not any(is_alive(worker) for worker in before)
        after = pool.run(2, process_id)
        assert not set(before) & set(after)
    assert not any(is_alive(worker) for worker in after)


def test_a_worker_that_does_not_end_is_killed():
    with WorkerPool(2) as pool:
        deaf = pool.run(2, be_deaf)
        assert all(is_alive(worker) for worker in deaf)
        pool.grace = 1.0
    assert not any(is_alive(worker) for worker in deaf)


@pytest.mark.parametrize("error", [TimeoutError, KeyboardInterrupt])
def test_a_call_that_is_interrupted_costs_later_calls_nothing(tmp_path, monkeypatch, error):
    hangs = tmp_path / "hangs"

    def interrupted(unheard: list[Connection], timeout: float) -> None:
        while not hangs.exists():
            time.sleep(0.01)
        raise error

    with WorkerPool(2) as pool:
        monkeypatch.setattr(workers, "wait", interrupted)
        with pytest.raises(error):
            pool.run(2, hang_on, 1, hangs)
        monkeypatch.undo()
        assert pool.run(2, sum_of_ranks)[1] == (1, 2, 1.0)


def fail_to_join() -> bool:
    """One rank leaves the group, and cannot join another."""
    if dist.get_rank() == 0:
        dist.destroy_process_group()
        with pytest.raises((RuntimeError, ValueError)):
            dist.init_process_group("gloo", store=dist.HashStore(), rank=3, world_size=2)
    return dist.is_initialized()


def test_a_group_that_could_not_be_joined_does_not_keep_the_next_ones_from_meeting():
    with WorkerPool(2, timeout=PATIENCE) as pool:
        assert pool.run(2, fail_to_join) == [False, True]
        assert pool.run(2, sum_of_ranks)[1] == (1, 2, 1.0)


def test_a_worker_that_has_died_between_two_calls_is_replaced():
    with WorkerPool(2) as pool:
        before = pool.run(2, process_id)
        os.kill(before[1], signal.SIGKILL)
        while is_alive(before[1]):
            time.sleep(0.01)
        with pytest.raises(OSError, match=r"pipe|reset"):
            pool.run(2, sum_of_ranks)
        assert pool.run(2, sum_of_ranks)[1] == (1, 2, 1.0)


@pytest.mark.slow
def test_workers_that_hang_end_with_the_process_that_made_them(tmp_path):
    code = """
import os, threading, time
from lightning_megatron.testing.workers import WorkerPool
pool = WorkerPool(2)
print("\\nworkers", *pool.run(2, os.getpid), flush=True)
threading.Thread(target=pool.run, args=(2, time.sleep, 600), daemon=True).start()
time.sleep(1)
os._exit(0)
"""
    env = {**os.environ, "TMPDIR": str(tmp_path)}  # a process that ends so removes nothing
    words = [sys.executable, "-c", code]
    result = subprocess.run(words, env=env, capture_output=True, text=True, check=True, timeout=600)
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("workers"))  # gloo may print others
    left = [int(word) for word in line.split()[1:]]
    assert len(left) == 2
    deadline = time.monotonic() + PATIENCE
    while any(map(is_alive, left)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not any(map(is_alive, left))
