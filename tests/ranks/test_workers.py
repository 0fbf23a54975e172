from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from lightning_megatron.testing.workers import WorkerError, WorkerPool, WorkerTimeoutError


def sum_of_ranks() -> tuple[int, int, float]:
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    return dist.get_rank(), dist.get_world_size(), x.item()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError(f"only rank {rank}")
    dist.barrier()


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


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


def test_a_hang_ends_with_the_stack_of_the_rank_that_hangs():
    with WorkerPool(2, timeout=300.0) as pool:
        pool.run(2, sum_of_ranks)
        pool.timeout = 1.5
        with pytest.raises(WorkerTimeoutError, match=r"ranks \[1\]") as caught:
            pool.run(2, hang_on, 1)
        assert "hang_on" in str(caught.value)
        pool.timeout = 30.0
        assert pool.run(2, sum_of_ranks)[0] == (0, 2, 1.0)


def test_a_dead_worker_is_reported_with_its_exit_code():
    with WorkerPool(2) as pool, pytest.raises(WorkerError, match=r"rank 1 .*\n.*exit code 7"):
        pool.run(2, die_on, 1)
