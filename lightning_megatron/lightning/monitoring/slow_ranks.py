"""Search for the rank that makes all others wait: arithmetic on their times, without processes.

In a parallel job all steps take equally long, and a slow rank is the one that waits least. So times without waits are
compared: with those of ranks that do the same work, or, if there are none (a pipeline of single ranks), with the
rank's own past.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

Kind = Literal["compute", "data"]


@dataclass(frozen=True)
class StepTimes:
    """Times of one rank in a few steps, in seconds.

    Attributes:
        compute: computing time of the fastest step: other load of the machine adds to some steps, but not to all.
        data: shortest wait for data in a step.
        waiting: median of the waits for other ranks.
        step: median of the times from step to step.
    """

    compute: float
    data: float
    waiting: float
    step: float

    @classmethod
    def of(cls, compute: Sequence[float], data: Sequence[float], waiting: Sequence[float], step: float) -> StepTimes:
        """Summarize some steps."""
        return cls(min(compute), min(data), median(waiting), step)


@dataclass(frozen=True)
class Straggler:
    """A rank that is slow.

    Attributes:
        rank: global rank.
        kind: ``"compute"`` or ``"data"``.
        seconds: shortest time of that kind in a step.
        usual: expected shortest time.
        share: part of the step time by which every step is longer.
        against_past: True if the expectation comes from the rank's own past, False if from its peers.
    """

    rank: int
    kind: Kind
    seconds: float
    usual: float
    share: float
    against_past: bool = False

    @property
    def factor(self) -> float:
        """Ratio of the time to the expected one."""
        return self.seconds / self.usual if self.usual > 0 else float("inf")


_NORMAL = 1.4826
"""Standard deviations of a normal distribution in one median absolute deviation."""


class _Past:
    """Earlier windows of one rank: computing times when it was not slow, and their excess over the expectation."""

    def __init__(self) -> None:
        self.compute: deque[float] = deque(maxlen=50)
        self.excess: dict[Kind, deque[float]] = {"compute": deque(maxlen=50), "data": deque(maxlen=50)}

    @property
    def usual(self) -> float | None:
        return median(self.compute) if len(self.compute) >= 3 else None

    def noise(self, kind: Kind) -> float:
        """Standard deviation of the excess; 0 at first."""
        known = self.excess[kind]
        return robust_deviation(known) if len(known) >= 3 else 0.0


class SlowRanks:
    """Reports a rank that has been slow in several windows in a row.

    A rank is slow in a window if its fastest step exceeds the expected time by a share of the step time plus twice the
    standard deviation of that excess. Noise of a machine hits some steps; of a slow rank, every step is slow.

    Args:
        peers: other ranks that do the same work, for each rank.
        share: part of the step time by which a slow rank makes steps longer.
        windows: number of windows in a row in which a rank must be slow.
    """

    def __init__(self, peers: Sequence[Sequence[int]], share: float, windows: int) -> None:
        self._peers, self._share, self._windows = peers, share, windows
        self._past = [_Past() for _ in peers]
        self._rows: dict[tuple[int, Kind], int] = {}
        self._named: set[tuple[int, Kind]] = set()

    def look(self, windows: Sequence[StepTimes]) -> tuple[list[Straggler], list[tuple[int, Kind]]]:
        """Evaluate one window of each rank.

        Returns:
            Ranks that are newly found slow, and those reported before that are slow no longer.
        """
        slow = {(found.rank, found.kind): found for found in self._slow(windows)}
        for rank, window in enumerate(windows):
            if (rank, "compute") not in slow:
                self._past[rank].compute.append(window.compute)
        self._rows = {key: self._rows.get(key, 0) + 1 for key in slow}
        new = [slow[key] for key, row in self._rows.items() if row >= self._windows and key not in self._named]
        over = [key for key in self._named if key not in slow]
        self._named = (self._named | {(found.rank, found.kind) for found in new}) - set(over)
        return new, sorted(over)

    def _slow(self, windows: Sequence[StepTimes]) -> list[Straggler]:
        step = median(window.step for window in windows)
        found: list[Straggler] = []
        if not step:  # no step has ended that began within the window
            return found
        for rank, window in enumerate(windows):
            data = median(other.data for position, other in enumerate(windows) if position != rank)
            pairs: list[tuple[Kind, float, float | None]] = [("data", window.data, data)]
            pairs.append(("compute", window.compute, self._usual_compute(rank, windows)))
            for kind, seconds, usual in pairs:
                if usual is None:
                    continue
                excess, past = (seconds - usual) / step, self._past[rank]
                if excess > self._share + 2 * past.noise(kind):
                    against_past = kind == "compute" and not self._peers[rank]
                    found.append(Straggler(rank, kind, seconds, usual, excess, against_past))
                else:
                    past.excess[kind].append(excess)
        return found

    def _usual_compute(self, rank: int, windows: Sequence[StepTimes]) -> float | None:
        if self._peers[rank]:
            return median(windows[peer].compute for peer in self._peers[rank])
        usual = self._past[rank].usual
        if usual is None:
            return None
        # If the others have more to do than before, as with longer texts, so has this one.
        changes = [
            window.compute / past.usual
            for other, (window, past) in enumerate(zip(windows, self._past, strict=True))
            if other != rank and past.usual
        ]
        return usual * max(1.0, median(changes)) if changes else usual


def robust_deviation(values: Collection[float]) -> float:
    """Standard deviation, estimated by the median absolute deviation, which a few outliers do not change."""
    middle = median(values)
    return _NORMAL * median(abs(value - middle) for value in values)


def excess(values: Sequence[float]) -> float:
    """Excess of the largest value over the median of the others."""
    *others, greatest = sorted(values)
    return greatest - median(others)
