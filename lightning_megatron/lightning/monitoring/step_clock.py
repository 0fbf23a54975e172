"""Parts of a step's time: computing, waiting for other ranks, waiting for data."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch
from lightning.pytorch.profilers import Profiler

from lightning_megatron import device as devices


@dataclass(frozen=True)
class BatchTime:
    """Seconds of one batch.

    Attributes:
        compute: from its start to its end, without waiting.
        waiting: in collectives and messages.
    """

    compute: float
    waiting: float


class StepClock(Protocol):
    """Times batches; as a :class:`~lightning_megatron.recorder.call.WaitClock`, what they wait for other ranks."""

    def begin_wait(self) -> None:
        """This rank waits from here on."""
        ...

    def end_wait(self) -> None:
        """It waits no more."""
        ...

    def begin_batch(self) -> None:
        """A batch begins."""
        ...

    def end_batch(self) -> None:
        """It is over, for the host."""
        ...

    def read(self) -> list[BatchTime]:
        """Times of the batches that are over, since this was last asked."""
        ...


class HostClock:
    """The host's clock, for devices that compute while the host waits: a CPU."""

    def __init__(self) -> None:
        self._waited = self._since = 0.0
        self._begun = self._waited_before = 0.0
        self._times: list[BatchTime] = []

    def begin_wait(self) -> None:
        """Note the time."""
        self._since = perf_counter()

    def end_wait(self) -> None:
        """Add it up."""
        self._waited += perf_counter() - self._since

    def begin_batch(self) -> None:
        """Note the time."""
        self._begun, self._waited_before = perf_counter(), self._waited

    def end_batch(self) -> None:
        """Divide it."""
        waiting = self._waited - self._waited_before
        self._times.append(BatchTime(perf_counter() - self._begun - waiting, waiting))

    def read(self) -> list[BatchTime]:
        """The batches that are over."""
        times, self._times = self._times, []
        return times


class DeviceClock:
    """Events in the stream of a device: nobody waits for it, and they are read when it has passed them.

    Where the host is slow, the device has nothing to do, which counts as computing.

    Args:
        device: of this rank.
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
        """Mark the place in the stream, within a batch."""
        if self._begun is not None:
            self._since = self._mark()

    def end_wait(self) -> None:
        """Mark the other end."""
        since, self._since = self._since, None
        if since is not None:
            self._waits.append((since, self._mark()))

    def begin_batch(self) -> None:
        """Mark the place in the stream."""
        self._waits, self._begun = [], self._mark()

    def end_batch(self) -> None:
        """Mark the other end."""
        self._batches.append((self._begun, self._mark(), self._waits))
        self._begun = None

    def read(self) -> list[BatchTime]:
        """The batches that are over; the host waits for the last of them, if the device is not there yet."""
        batches, self._batches = self._batches, []
        if batches:
            batches[-1][1].synchronize()
        times = []
        for begun, ended, waits in batches:
            waiting = sum(since.elapsed_time(until) for since, until in waits) / 1e3
            times.append(BatchTime(begun.elapsed_time(ended) / 1e3 - waiting, waiting))
            self._spare.extend((begun, ended, *(event for pair in waits for event in pair)))
        return times


def step_clock(device: torch.device) -> StepClock:
    """The clock for a device."""
    return HostClock() if devices.timing_event(device) is None else DeviceClock(device)


class FetchClock(Profiler):
    """Times how long training waits for batches: Lightning profiles that, and nothing else of it has a hook.

    Args:
        inner: the Trainer's profiler, which goes on as before.
    """

    def __init__(self, inner: Profiler) -> None:
        super().__init__()
        self.inner = inner
        self._since = self._waited = 0.0

    def start(self, action_name: str) -> None:
        """Note the time where a batch is asked for."""
        self.inner.start(action_name)
        if action_name == _FETCH:
            self._since = perf_counter()

    def stop(self, action_name: str) -> None:
        """Add it up where it is there."""
        if action_name == _FETCH:
            self._waited += perf_counter() - self._since
        self.inner.stop(action_name)

    def take(self) -> float:
        """Seconds since this was last asked."""
        waited, self._waited = self._waited, 0.0
        return waited


_FETCH = "[_TrainingEpochLoop].train_dataloader_next"
