"""Measurements of a rank's first steps, and one line that summarizes all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from lightning_megatron.device import SoftwareCounters

STEADY = 0.97
"""A step time below this fraction of the previous window's is still falling."""


@dataclass
class FirstSteps:
    """Measurements of one rank.

    Attributes:
        card: number of the card; empty if it is not known.
        counts: True if the device's software counts compilations and fallbacks.
        steps: optimizer steps so far.
        compilations: graphs that the device's software compiled.
        compile_seconds: time of these compilations.
        last_compiled: last step in which a graph was compiled.
        fallbacks: calls of ops that ran on the host, by name.
        last_fallback: last step in which an op ran on the host.
        graphs: graphs of ``torch.compile``.
        graph_breaks: graph breaks of ``torch.compile``.
        memory: bytes in use and at the peak, by step.
        first_collectives: seconds of the first collective of each group.
        step_seconds: mean time of a step, window by window.
    """

    card: str = ""
    counts: bool = False
    steps: int = 0
    compilations: int = 0
    compile_seconds: float = 0.0
    last_compiled: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)
    last_fallback: int = 0
    graphs: int = 0
    graph_breaks: int = 0
    memory: dict[int, tuple[int, int]] = field(default_factory=dict)
    first_collectives: dict[str, float] = field(default_factory=dict)
    step_seconds: list[float] = field(default_factory=list)

    def add_counters(self, new: SoftwareCounters, step: int) -> None:
        """Add the counts of one step."""
        self.compilations += new.compilations
        self.compile_seconds += new.compile_seconds
        self.last_compiled = step if new.compilations else self.last_compiled
        for name, count in new.fallbacks.items():
            self.fallbacks[name] = self.fallbacks.get(name, 0) + count
        self.last_fallback = step if new.fallbacks else self.last_fallback


def summary(ranks: Sequence[FirstSteps], window: int) -> str:
    """One line about all ranks, where each entry of ``step_seconds`` is of ``window`` steps."""
    parts = [f"steps 1 to {ranks[0].steps}"]
    if any(rank.counts for rank in ranks):
        parts += [_compilations(ranks), _fallbacks(ranks)]
    if any(rank.graphs for rank in ranks):
        graphs, breaks = _span(ranks, lambda rank: rank.graphs), _span(ranks, lambda rank: rank.graph_breaks)
        parts.append(f"torch.compile: graphs {graphs}, breaks {breaks}")
    memory = [_memory(ranks, step) for step in sorted(ranks[0].memory)]
    if memory:
        parts.append(f"GiB in use / peak {', '.join(memory)}")
    parts += _groups(ranks)
    if any(rank.card for rank in ranks):
        parts.append(f"cards {','.join(rank.card or '?' for rank in ranks)}")
    return "; ".join([*parts, _times(ranks[0].step_seconds, window)])


def _compilations(ranks: Sequence[FirstSteps]) -> str:
    most = max(ranks, key=lambda rank: rank.compile_seconds)
    if not most.compilations:
        return "no graph compiled"
    last = max(rank.last_compiled for rank in ranks)
    count = _span(ranks, lambda rank: rank.compilations)
    return f"graphs compiled {count}, in at most {most.compile_seconds:.1f} s, the last in step {last}"


def _fallbacks(ranks: Sequence[FirstSteps]) -> str:
    names = sorted({name for rank in ranks for name in rank.fallbacks})
    if not names:
        return "no CPU fallback"
    counts = (f"{name} x {max(rank.fallbacks.get(name, 0) for rank in ranks)}" for name in names)
    return f"CPU fallbacks {', '.join(counts)}, the last in step {max(rank.last_fallback for rank in ranks)}"


def _memory(ranks: Sequence[FirstSteps], step: int) -> str:
    """Memory of the fullest rank after a step."""
    used, peak = (max(rank.memory[step][n] for rank in ranks if step in rank.memory) / 2**30 for n in (0, 1))
    return f"after step {step}: {used:.2f} / {peak:.2f}"


def _groups(ranks: Sequence[FirstSteps]) -> list[str]:
    names = list(dict.fromkeys(name for rank in ranks for name in rank.first_collectives))
    slowest = [max(rank.first_collectives.get(name, 0.0) for rank in ranks) for name in names]
    told = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in zip(names, slowest, strict=True))
    return [f"first collectives {told}"] if told else []


def _times(seconds: Sequence[float], window: int) -> str:
    if len(seconds) < 2:
        return f"no trend of the step time: it takes {2 * window} steps"
    before, last = (1e3 * each for each in seconds[-2:])
    trend = "still falling" if last < STEADY * before else "steady"
    return f"step time {last:.1f} ms, {before:.1f} ms in the {window} steps before: {trend}"


def _span(ranks: Iterable[FirstSteps], number: Callable[[FirstSteps], int]) -> str:
    """The number that all ranks share, or the minimum and maximum over ranks."""
    found = [number(rank) for rank in ranks]
    return str(found[0]) if min(found) == max(found) else f"{min(found)} to {max(found)}"
