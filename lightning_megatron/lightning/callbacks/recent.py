"""Window of recent values, with a robust test of a new value against them."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from statistics import median

from lightning_megatron.lightning.monitoring.slow_ranks import robust_deviation


class Recent:
    """Window of values with a median and a deviation that a few outliers do not change.

    Args:
        size: number of values in a full window.
        floor: lower bound of the deviation, as a fraction of the median, for values that hardly differ.
    """

    def __init__(self, size: int, floor: float) -> None:
        self._size, self._floor = size, floor
        self._values: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        """Append a finite value; drop the oldest of a full window."""
        if len(self._values) == self._size:
            del self._sorted[bisect_left(self._sorted, self._values.popleft())]
        self._values.append(value)
        insort(self._sorted, value)

    @property
    def median(self) -> float:
        """Median of the window."""
        return median(self._sorted)

    @property
    def deviation(self) -> float:
        """Robust standard deviation; at least the floor."""
        return max(robust_deviation(self._sorted), self._floor * abs(self.median))

    def deviations_above(self, value: float) -> float:
        """Distance of a value above the median, in deviations; if these are 0, infinite for any other value."""
        distance, deviation = value - self.median, self.deviation
        return distance / deviation if deviation else math.copysign(math.inf, distance) if distance else 0.0

    def is_near(self, value: float, threshold: float) -> bool:
        """Quick check that uses the floor alone: if True, ``value`` is at most ``threshold`` deviations too high."""
        return value - self.median <= threshold * self._floor * abs(self.median)

    def state(self) -> list[float]:
        """The values, oldest first."""
        return list(self._values)

    def load(self, values: Iterable[float]) -> None:
        """Restore values that :meth:`state` returned; keep the last ones if the window is smaller."""
        self._values.clear()
        self._sorted.clear()
        for value in values:
            self.add(value)
