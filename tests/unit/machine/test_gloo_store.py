"""Traffic of gloo's groups with the store of rank 0, counted, against n log n."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from math import log2
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from lightning_megatron import device as devices

SIZES = (8, 16, 32, 64)


def counts(variables: dict[str, str]) -> list[dict[str, int]]:
    """Counts for each size, in a process with these variables."""
    script = Path(__file__).parents[2] / "gloo_store.py"
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"} | variables
    sizes = map(str, SIZES)
    done = subprocess.run([sys.executable, script, *sizes], env=environment, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.skipif(Version(torch.__version__) < Version("2.8"), reason="torch connects all pairs before 2.8")
def test_ranks_that_connect_on_demand_ask_the_store_n_log_n_times() -> None:
    variables: dict[str, str] = {}
    devices.connect_on_demand(SIZES[-1], variables)
    for size, found in zip(SIZES, counts(variables), strict=True):
        assert found["start"] == size, "each rank tells its address"
        assert found["all"] <= 5 * size * log2(size)
        assert found["bytes"] <= 400 * size * log2(size)
        assert found["sockets"] <= 3 * size * log2(size)


def test_small_jobs_and_the_users_own_choice_stay_as_they_are() -> None:
    given = {"TORCH_GLOO_LAZY_INIT": "0"}
    devices.connect_on_demand(1024, given)
    assert given == {"TORCH_GLOO_LAZY_INIT": "0"}
    small: dict[str, str] = {}
    devices.connect_on_demand(63, small)
    assert not small
