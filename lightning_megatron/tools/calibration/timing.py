"""Time of a function on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from lightning_megatron.device import mark_step, synchronize

ROUNDS = 5
"""Measurements of one function, of which the median counts."""


def seconds_of(function: Callable[[], object], device: torch.device, limit: float = 1.0) -> float:
    """Median seconds of a call.

    Args:
        function: function to time.
        device: device on which it works.
        limit: seconds that all calls together should take.
    """

    def run(times: int) -> float:
        synchronize(device)
        begun = time.perf_counter()
        for _ in range(times):
            function()
            mark_step(device)
        synchronize(device)
        return (time.perf_counter() - begun) / times

    run(1)  # warm-up: kernels are compiled, memory is allocated
    one = run(1)
    times = max(1, min(100, int(limit / ROUNDS / max(one, 1e-7))))
    rounds = ROUNDS if one * ROUNDS < 3 * limit else 1
    return statistics.median(run(times) for _ in range(rounds))
