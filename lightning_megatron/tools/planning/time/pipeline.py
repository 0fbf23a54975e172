"""Time of a pipeline by closed formulas for any stage costs; tests compare them with ``pipeline/simulate.py``.

Each rank's time is a sum: the way of the first activation to it and of the last gradient back from it, its own work,
and its waits for the ranks behind it, less the forwards and backwards that it runs meanwhile. The step takes as long
as the slowest rank. For equal stages and free messages the formulas give the bubbles of the schedules' papers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_megatron.pipeline.schedule import schedule_kind


@dataclass(frozen=True)
class StageCosts:
    """Seconds of one micro-batch on every stage, by stage number.

    Attributes:
        pp: pipeline ranks.
        forward: seconds of the forward of each of the ``pp x vpp`` stages.
        backward: seconds of the backward.
        message: seconds in which an activation or gradient travels.
    """

    pp: int
    forward: Sequence[float]
    backward: Sequence[float]
    message: float = 0.0

    @property
    def vpp(self) -> int:
        """Stages of a rank."""
        return len(self.forward) // self.pp

    def work(self, rank: int) -> float:
        """Seconds of one micro-batch on all stages of a rank."""
        return sum(self.forward[rank :: self.pp]) + sum(self.backward[rank :: self.pp])


def pipeline_seconds(schedule: str, costs: StageCosts, num_micro_batches: int) -> float:
    """Seconds of all forwards and backwards of a step, idle time included.

    Args:
        schedule: name of the schedule, one of those of ``pipeline.schedule.SCHEDULES``.
        costs: seconds of the stages.
        num_micro_batches: micro-batches of the step.
    """
    if costs.pp == 1:
        return num_micro_batches * costs.work(0)
    kind = schedule_kind(schedule, costs.vpp)
    if not kind.alternates:
        return _gpipe(costs, num_micro_batches)
    if costs.vpp > 1:
        return _interleaved(costs, num_micro_batches, 0.5 if kind.splits_backward else 0.0)
    return _one_f_one_b(costs, num_micro_batches, splits=kind.splits_backward)


def _gpipe(costs: StageCosts, m: int) -> float:
    """All forwards, then all backwards: each takes the sum of the stages, and ``m - 1`` times the slowest stage."""
    ways = 2 * (costs.pp - 1) * costs.message
    return sum(sum(each) + (m - 1) * max(max(each), 0.0) for each in (costs.forward, costs.backward)) + ways


def _one_f_one_b(costs: StageCosts, m: int, splits: bool) -> float:
    """1F1B, and ZB-H1 with ``splits``: other ranks wait only for the half of a backward that makes input gradients."""
    f, b, c, pp = costs.forward, costs.backward, costs.message, costs.pp
    gradient = [each / 2 for each in b] if splits else list(b)
    behind_f, behind_b = _sums_behind(f, c), _sums_behind(gradient, c)
    before_f, before_b = _sums_before(f, c), _sums_before(gradient, c)
    slowest = 0.0
    for r in range(pp):
        ahead = min(pp - 1 - r, m - 1)  # warm-up forwards, which fill the wait
        loop = behind_f[r] + behind_b[r]
        waits = max(0.0, loop - ahead * f[r])
        # With no forward left after the first backward there is one wait, and not a second one at the end.
        cools = max(0.0, loop - ahead * b[r]) if m > pp - r else 0.0
        # Deferred halves fill the end: r of them are left when the last gradient has gone upwards.
        ends = max(0.0, before_b[r] - r * (b[r] - gradient[r]))
        # In the steady state a loop to the last rank and back holds pp - r micro-batches.
        turn = (f[r] + gradient[r] + loop) / (pp - r)
        steady = max(0, m - 1 - ahead) * max(0.0, turn - f[r] - b[r])
        slowest = max(slowest, before_f[r] + m * (f[r] + b[r]) + waits + cools + ends + steady)
    return slowest


def _sums_behind(costs: Sequence[float], message: float) -> list[float]:
    """Sum over all later ranks, with a message each."""
    sums = [0.0]
    for cost in reversed(costs[1:]):
        sums.append(sums[-1] + cost + message)
    return sums[::-1]


def _sums_before(costs: Sequence[float], message: float) -> list[float]:
    """Sum over all earlier ranks, with a message each."""
    sums = [0.0]
    for cost in costs[:-1]:
        sums.append(sums[-1] + cost + message)
    return sums


def _interleaved(costs: StageCosts, m: int, deferred: float) -> float:
    """Interleaved 1F1B: the ways to a rank and back pass one chunk of each rank; a rank's work is that of all chunks.

    Args:
        costs: seconds of the stages.
        m: micro-batches.
        deferred: share of a backward that no other rank waits for.
    """
    f, b, c, pp, vpp = costs.forward, costs.backward, costs.message, costs.pp, costs.vpp
    last = pp * (vpp - 1)
    waited = [each * (1 - deferred) for each in b]
    before = _sums_before([f[i] + waited[i] for i in range(pp)], 2 * c)
    behind = _sums_behind([f[last + i] + waited[last + i] for i in range(pp)], 2 * c)
    # A micro-batch passes a rank's chunks on loops of vpp, vpp - 1, ... 1 times pp stages; ``flying`` are in flight.
    per_chunk = sum(f) / (pp * vpp) + sum(b) / (pp * vpp)
    flying = (vpp + 1) * pp - 1
    turn = vpp * (vpp + 1) / 2 * pp * (per_chunk + 2 * c) / flying
    slowest = 0.0
    for r in range(pp):
        work = costs.work(r)
        own = deferred * sum(b[r::pp]) / vpp * (pp - 1)
        ends = max(0.0, before[r] + behind[r] - own)
        slowest = max(slowest, m * max(work, turn) + ends)
    return slowest
