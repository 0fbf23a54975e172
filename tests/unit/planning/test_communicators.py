"""Communicators of a rank: their number, against the groups of a mesh, and their memory in plans and checks."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.lightning.validation.memory import UNKNOWN, MemoryLimit
from lightning_megatron.mesh import axis_groups
from lightning_megatron.tools.forecast import Forecast
from lightning_megatron.tools.planning.core.communicators import num_communicators
from lightning_megatron.tools.planning.core.device_file import load_device
from lightning_megatron.tools.planning.plan import plan_of
from lightning_megatron.tools.planning.settings import Feed, job_of
from tests.tiny import tiny_llama

TABLE: dict[str, tuple[int, dict[str, Any], int, int]] = {
    "dp 8": (8, {}, 1, 0),
    "tp 8": (8, {"tp": 8}, 1, 0),
    "tp 2": (8, {"tp": 2}, 3, 0),
    "tp 2, pp 2": (8, {"tp": 2, "pp": 2}, 4, 1),
    "tp 8, pp 4": (64, {"tp": 8, "pp": 4}, 5, 2),
    "tp 2, cp 2": (16, {"tp": 2, "cp": 2}, 5, 1),
    "cp 8, a2a": (16, {"cp": 8, "cp_comm_type": "a2a"}, 3, 0),
    "tp 2, pp 4, cp 2, ep 8": (1024, {"tp": 2, "pp": 4, "cp": 2, "ep": 8}, 10, 3),
    "ep 8": (64, {"ep": 8}, 3, 0),
}
"""Ranks, layout, groups of different members that a rank is in, and pairs with neighbours in a pipeline and a ring."""


@pytest.mark.parametrize("name", TABLE)
def test_a_layout_has_so_many_groups(name: str) -> None:
    size, arguments, groups, pairs = TABLE[name]
    layout = ParallelLayout(**arguments).resolve(size)
    of_mesh = {ranks for kind in axis_groups(layout).values() for ranks in kind if 0 in ranks and len(ranks) > 1}
    assert len(of_mesh) == groups
    assert num_communicators(layout) == groups + pairs


def test_a_plan_and_the_check_before_a_run_count_their_memory() -> None:
    feed = Feed(16, 16, 2, 1, "bf16-mixed")
    job = job_of(tiny_llama(), feed, {"tp": 2, "cp": 2}, fp8=False, attention="flash", optimizer_states=2)
    h100 = load_device("h100")
    limit = 4 << 30
    plan = plan_of(job, limit, h100, timed=False)
    assert plan.communicator_bytes == 6 * h100.communicator_bytes
    assert plan.limit == limit - plan.communicator_bytes
    assert plan_of(job, limit, load_device("gaudi2"), timed=False).communicator_bytes == 0
    assert plan_of(job, limit, replace(h100, communicator_bytes=1 << 30), timed=False).fits is False
    assert not Forecast(job, MemoryLimit(limit, "NVIDIA H100 80GB HBM3")).problems()
    (problem,) = Forecast(job, MemoryLimit(2 << 30, "NVIDIA H100 80GB HBM3")).problems()
    assert "6 communicators take 3" in str(problem.reason)


def test_memory_beside_tensors_is_logged_once_on_cuda(caplog: pytest.LogCaptureFixture) -> None:
    counters = {"mem_get_info": (70 << 30, 80 << 30), "memory_reserved": 6 << 30}
    prediction = Forecast(None, UNKNOWN)
    patched: dict[str, Any] = {name: lambda _, told=value: told for name, value in counters.items()}
    with mock.patch.multiple(torch.cuda, **patched), caplog.at_level(logging.INFO):
        for step in (1, 2, 3):
            prediction.measure("Strategy", step, torch.device("cuda", 0), 0)
    assert [record.getMessage() for record in caplog.records] == [
        "Strategy: 4.00 GiB of rank 0's device are not in tensors"
    ]
