"""Clocks for the parts of a step: computing, waiting for other ranks, waiting for data."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch.profilers import Profiler

from lightning_megatron import device as devices


@dataclass(frozen=True)
class BatchTime:
    """Times of one batch, in seconds.

    Attributes:
        compute: time from its begin to its end, without waits.
        waiting: time of the waits in collectives and messages.
    """

    compute: float
    waiting: float


class HostClock:
    """Clock of the host, for devices without timing events: a CPU."""

    def __init__(self) -> None:
        self._waited = self._since = 0.0
        self._begun = self._waited_before = 0.0
        self._times: list[BatchTime] = []

    def begin_wait(self) -> None:
        """Note the start of a wait."""
        self._since = perf_counter()

    def end_wait(self) -> None:
        """Add up the time of the wait."""
        self._waited += perf_counter() - self._since

    def begin_batch(self) -> None:
        """Note the start of a batch."""
        self._begun, self._waited_before = perf_counter(), self._waited

    def end_batch(self) -> None:
        """Divide the time of the batch into computing and waiting."""
        waiting = self._waited - self._waited_before
        self._times.append(BatchTime(perf_counter() - self._begun - waiting, waiting))

    def read(self) -> list[BatchTime]:
        """Times of the batches that have ended since the last call."""
        times, self._times = self._times, []
        return times


class DeviceClock:
    """Clock of a device: events in its stream, which are read after the device has passed them.

    Time in which the device idles because the host is slow counts as computing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spare: deque[Any] = deque()
        self._batches: list[tuple[Any, Any, list[tuple[Any, Any]]]] = []
        self._waits: list[tuple[Any, Any]] = []
        self._begun: Any = None
        self._since: Any = None

    def _mark(self) -> Any:
        event = self._spare.popleft() if self._spare else devices.timing_event(self._device)
        assert event is not None
        event.record()
        return event

    def begin_wait(self) -> None:
        """Record the start of a wait in the stream, within a batch."""
        if self._begun is not None:
            self._since = self._mark()

    def end_wait(self) -> None:
        """Record the end of a wait."""
        since, self._since = self._since, None
        if since is not None:
            self._waits.append((since, self._mark()))

    def begin_batch(self) -> None:
        """Record the start of a batch."""
        self._waits, self._begun = [], self._mark()

    def end_batch(self) -> None:
        """Record the end of a batch."""
        self._batches.append((self._begun, self._mark(), self._waits))
        self._begun = None

    def read(self) -> list[BatchTime]:
        """Times of the batches that have ended since the last call; the host waits for the end of the last one."""
        batches, self._batches = self._batches, []
        if batches:
            batches[-1][1].synchronize()
        times = []
        for begun, ended, waits in batches:
            waiting = sum(since.elapsed_time(until) for since, until in waits) / 1e3
            times.append(BatchTime(begun.elapsed_time(ended) / 1e3 - waiting, waiting))
            self._spare.extend((begun, ended, *(event for pair in waits for event in pair)))
        return times


StepClock = HostClock | DeviceClock
"""Clock for batches, and, as a :class:`~lightning_megatron.recorder.recorder.WaitClock`, for their waits."""


def step_clock(device: torch.device) -> StepClock:
    """Clock for a device."""
    return HostClock() if devices.timing_event(device) is None else DeviceClock(device)


class FetchClock(Profiler):
    """Profiler that times the waits of training for batches: Lightning has no other hook around them.

    Args:
        inner: the Trainer's profiler, which still gets every call.
    """

    def __init__(self, inner: Profiler) -> None:
        super().__init__()
        self.inner = inner
        self._since = self._waited = 0.0

    def start(self, action_name: str) -> None:
        """Forward the start of an action; if it fetches a batch, note the time."""
        self.inner.start(action_name)
        if action_name == _FETCH:
            self._since = perf_counter()

    def stop(self, action_name: str) -> None:
        """Forward the end of an action; if it fetches a batch, add its time to the waits."""
        if action_name == _FETCH:
            self._waited += perf_counter() - self._since
        self.inner.stop(action_name)

    def take(self) -> float:
        """Seconds of waits since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited


_FETCH = "[_TrainingEpochLoop].train_dataloader_next"
