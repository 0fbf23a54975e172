"""Finding the rank that makes all others wait: arithmetic on their times, without processes.

In a parallel job all steps take equally long, and a slow rank is the one that waits least. So times without waiting are
compared: with those of ranks that do the same work, or, where no other does (a pipeline of single ranks), with the
rank's own past.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

Kind = Literal["compute", "data"]


@dataclass(frozen=True)
class Window:
    """Seconds of one rank in a few steps.

    Attributes:
        compute: without waiting, of the step with the least: whatever else a machine does adds to some steps, and what
            a rank needs is in all of them.
        data: waiting for data, of the step with the least.
        waiting: for other ranks, median.
        step: from step to step, median.
    """

    compute: float
    data: float
    waiting: float
    step: float

    @classmethod
    def of(cls, compute: Sequence[float], data: Sequence[float], waiting: Sequence[float], step: float) -> Window:
        """Sum up some steps."""
        return cls(min(compute), min(data), median(waiting), step)


@dataclass(frozen=True)
class Straggler:
    """A rank that is slow.

    Attributes:
        rank: global.
        kind: ``"compute"`` or ``"data"``.
        seconds: of that in a step, at the least.
        usual: seconds that are to be expected, at the least.
        share: of the step time, by which every step is longer.
        against_past: whether what is expected comes from the rank's own past; else from its peers.
    """

    rank: int
    kind: Kind
    seconds: float
    usual: float
    share: float
    against_past: bool = False

    @property
    def factor(self) -> float:
        """Times that it takes what is usual."""
        return self.seconds / self.usual if self.usual > 0 else float("inf")


_NORMAL = 1.4826
"""Standard deviations of a normal distribution in one median absolute deviation."""


class _Past:
    """Windows of one rank: what it computed where it was not slow, and by how much it lay above what is usual."""

    def __init__(self) -> None:
        self.compute: deque[float] = deque(maxlen=50)
        self.excess: dict[Kind, deque[float]] = {"compute": deque(maxlen=50), "data": deque(maxlen=50)}

    @property
    def usual(self) -> float | None:
        return median(self.compute) if len(self.compute) >= 3 else None

    def noise(self, kind: Kind) -> float:
        """Standard deviation of the excess, judged by the median of the distances from the median; 0 at first."""
        known = self.excess[kind]
        if len(known) < 3:
            return 0.0
        middle = median(known)
        return _NORMAL * median(abs(value - middle) for value in known)


class SlowRanks:
    """Looks at windows of all ranks, and names a rank once it has been slow in several of them.

    A rank is slow in a window if its fastest step took longer than what is usual, by a share of the step time and twice
    what that share varies by anyway. Noise of a machine hits steps here and there; of a slow rank, every step is slow.

    Args:
        peers: for each rank, the others that do the same work.
        share: of the step time, by which a slow rank makes steps longer.
        windows: in a row in which it must be slow.
    """

    def __init__(self, peers: Sequence[Sequence[int]], share: float, windows: int) -> None:
        self._peers, self._share, self._windows = peers, share, windows
        self._past = [_Past() for _ in peers]
        self._rows: dict[tuple[int, Kind], int] = {}
        self._named: set[tuple[int, Kind]] = set()

    def look(self, windows: Sequence[Window]) -> tuple[list[Straggler], list[tuple[int, Kind]]]:
        """Take in one window of all ranks.

        Args:
            windows: by rank.

        Returns:
            Ranks that have turned out slow, and those named before that are not any more.
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

    def _slow(self, windows: Sequence[Window]) -> list[Straggler]:
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

    def _usual_compute(self, rank: int, windows: Sequence[Window]) -> float | None:
        if self._peers[rank]:
            return median(windows[peer].compute for peer in self._peers[rank])
        usual = self._past[rank].usual
        if usual is None:
            return None
        # Where the others have more to do than before, as with longer texts, so has this one.
        changes = [
            window.compute / past.usual
            for other, (window, past) in enumerate(zip(windows, self._past, strict=True))
            if other != rank and past.usual
        ]
        return usual * max(1.0, median(changes)) if changes else usual


def excess(values: Sequence[float]) -> float:
    """By how much the greatest of some values exceeds the median of the others."""
    *others, greatest = sorted(values)
    return greatest - median(others)
