"""The recent values of a number, and whether another one is far above them."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable

NORMAL = 1.4826
"""Standard deviations of a normal distribution in one median absolute deviation."""


class Recent:
    """A window of values with its median and spread, which a few outliers do not move.

    Args:
        size: values of the window.
        floor: least deviation that is believed, as a share of the median: values that hardly differ are no measure.
    """

    def __init__(self, size: int, floor: float) -> None:
        self._size, self._floor = size, floor
        self._values: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        """Take in a finite value; the oldest one leaves where the window is full."""
        if len(self._values) == self._size:
            del self._sorted[bisect_left(self._sorted, self._values.popleft())]
        self._values.append(value)
        insort(self._sorted, value)

    @property
    def median(self) -> float:
        """The value in the middle."""
        return _middle(self._sorted)

    @property
    def deviation(self) -> float:
        """A standard deviation, judged by the median of the distances from the median."""
        median = self.median
        spread = NORMAL * _middle(sorted(abs(value - median) for value in self._sorted))
        return max(spread, self._floor * abs(median))

    def deviations_above(self, value: float) -> float:
        """Distance of a value above the median, in deviations; infinitely many where nothing has ever differed."""
        distance, deviation = value - self.median, self.deviation
        return distance / deviation if deviation else math.copysign(math.inf, distance) if distance else 0.0

    def is_near(self, value: float, threshold: float) -> bool:
        """True if ``value`` is surely no more than ``threshold`` deviations above the median, found at little cost."""
        return value - self.median <= threshold * self._floor * abs(self.median)

    def state(self) -> list[float]:
        """The values, oldest first."""
        return list(self._values)

    def load(self, values: Iterable[float]) -> None:
        """Go on with values that :meth:`state` gave; where they are too many, with the last ones."""
        self._values.clear()
        self._sorted.clear()
        for value in values:
            self.add(value)


def _middle(values: list[float]) -> float:
    half = len(values) // 2
    return values[half] if len(values) % 2 else (values[half - 1] + values[half]) / 2
