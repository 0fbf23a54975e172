"""Streams and events. All work is done when a call returns, so they only check the order of calls."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Event:
    """A point in a stream.

    Args:
        enable_timing: True to allow :meth:`elapsed_time`.
    """

    def __init__(self, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing
        self._time: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Note the time."""
        self._time = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Make a stream wait for the event.

        Raises:
            RuntimeError: if the event was not recorded: on the device such a wait would have no effect.
        """
        if self._time is None:
            raise RuntimeError("an event is waited for before it was recorded")

    def query(self) -> bool:
        """True if the event is reached: always."""
        return True

    def synchronize(self) -> None:
        """Wait for the event on the host."""

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to another one."""
        if not (self.enable_timing and end.enable_timing) or self._time is None or end._time is None:
            raise RuntimeError("both events must be recorded, with enable_timing")
        return 1000 * (end._time - self._time)


class Stream:
    """A queue of work."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device = torch.device("hpu", 0)
        self.priority = priority

    def wait_event(self, event: Event) -> None:
        """Wait for an event."""
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        """Wait for all work of another stream."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event in this stream."""
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """True if all work is done."""
        return True

    def synchronize(self) -> None:
        """Wait for all work."""


_default = Stream()
_current = [_default]


def current_stream(device: Any = None) -> Stream:
    """The stream in use."""
    return _current[-1]


def default_stream(device: Any = None) -> Stream:
    """The stream in use at the start."""
    return _default


def set_stream(stream: Stream) -> None:
    """Use a stream from now on."""
    _current[-1] = stream


@contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """Context that uses a stream."""
    _current.append(stream or _current[-1])
    try:
        yield
    finally:
        _current.pop()


def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
    """Keep the memory of a tensor until a stream is done with it."""
