"""Metrics that count since the import of ``habana_frameworks``, or since their reset.

As in the bridge, ``stats()`` is a list of pairs of a name and a value, and times are in microseconds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from typing import Any

from simulated_hpu import events


class Metric(ABC):
    """Statistics of one kind of event."""

    def __init__(self) -> None:
        self.reset()
        events.subscribe(self.name(), self._take)

    @abstractmethod
    def name(self) -> str:
        """Name for :func:`metric_global`."""

    @abstractmethod
    def stats(self) -> list[tuple[str, Any]]:
        """Names and values."""

    @abstractmethod
    def reset(self) -> None:
        """Reset to zero."""

    @abstractmethod
    def _take(self, parameters: events.Parameters) -> None: ...


class GraphCompilationMetric(Metric):
    """Compiled graphs; single ops of the eager mode are not counted."""

    def name(self) -> str:
        """Name for :func:`metric_global`."""
        return events.GRAPH_COMPILATION

    def stats(self) -> list[tuple[str, Any]]:
        """Number, microseconds of all, microseconds of one."""
        mean = self._microseconds / self._number if self._number else 0
        return [("TotalNumber", self._number), ("TotalTime", self._microseconds), ("AvgTime", mean)]

    def reset(self) -> None:
        """Reset to zero."""
        self._number = self._microseconds = 0

    def _take(self, parameters: events.Parameters) -> None:
        self._number += 1
        self._microseconds += int(parameters["duration"])


class CpuFallbackMetric(Metric):
    """Calls of ops that have no kernel on the device."""

    def name(self) -> str:
        """Name for :func:`metric_global`."""
        return events.CPU_FALLBACK

    def stats(self) -> list[tuple[str, Any]]:
        """Number of calls, and number of calls by op."""
        return [("TotalNumber", self._ops.total()), ("FallbackOps", dict(self._ops))]

    def reset(self) -> None:
        """Reset to zero."""
        self._ops: Counter[str] = Counter()

    def _take(self, parameters: events.Parameters) -> None:
        self._ops[parameters["op_name"]] += 1


_metrics: dict[str, Metric] = {metric.name(): metric for metric in (GraphCompilationMetric(), CpuFallbackMetric())}


def metric_global(name: str) -> Metric | None:
    """The metric of this process with a name; ``None`` for an unknown name."""
    return _metrics.get(name)
