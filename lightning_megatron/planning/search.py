"""Search for the fastest layouts that fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import count
from math import ceil

from lightning_megatron.errors import ConfigError
from lightning_megatron.planning.bound import Bound
from lightning_megatron.planning.candidates import (
    CandidateGroup,
    LayoutCandidate,
    impossible,
    job_of_candidate,
    layout_candidates,
    with_fewer_layers,
)
from lightning_megatron.planning.memory.half import OF_LAYERS
from lightning_megatron.planning.memory.peak import worst_memory
from lightning_megatron.planning.plan import Plan, kernels_of, plan_of
from lightning_megatron.planning.request import PlanRequest
from lightning_megatron.planning.time.step import time_of

TRIALS = 24
"""Layouts to time before the search may stop: the lowest ratio of a time to its bound shows how low bounds are."""
MARGIN = 0.97
"""Safety factor on that lowest ratio: later candidates may come a little closer to their bounds."""


@dataclass(frozen=True)
class Found:
    """Layouts of a search.

    Attributes:
        plans: the fastest layouts that fit, by predicted tokens/s; one for each combination of axis sizes.
        possible: number of candidates.
        looked_at: number of candidates whose memory was computed.
        closest: the layout that needs least memory, if none fits.
    """

    plans: tuple[Plan, ...]
    possible: int
    looked_at: int
    closest: Plan | None = None


@dataclass
class _State:
    """Results of a search so far.

    Attributes:
        best: fastest plan that fits, by axis sizes.
        memories: plans without a time, by candidate; ``None`` for one that is impossible.
        fitting: shortest time of candidates that fit, by candidate without recomputation; 0 if that one fits itself.
        closest: layout with least memory of those that do not fit.
        lowest_ratio: smallest ratio of a time to its bound.
        timed: number of times predicted.
    """

    best: dict[tuple[int, ...], Plan] = field(default_factory=dict)
    memories: dict[LayoutCandidate, Plan | None] = field(default_factory=dict)
    fitting: dict[LayoutCandidate, float] = field(default_factory=dict)
    closest: Plan | None = None
    lowest_ratio: float = float("inf")
    timed: int = 0

    def is_beaten(self, least: float, top: int) -> bool:
        """True if a candidate whose lower bound is ``least`` seconds can hardly be among the ``top``."""
        if self.timed < TRIALS or len(self.best) < top:
            return False
        return least * self.lowest_ratio * MARGIN > sorted(map(step_seconds, self.best.values()))[top - 1]


def search(request: PlanRequest, top: int = 5) -> Found:
    """The fastest layouts that fit, one for each combination of axis sizes.

    Candidates are tried in the order of their lower bounds (:class:`Bound`), until no other can be among the ``top``.
    A group of them waits with a bound of all, so that most are never looked at one by one.
    Ways to recompute that cannot be faster than one that fits are skipped, and no more whole layers are recomputed
    than the memory requires.

    Args:
        request: model, devices and batches.
        top: number of layouts.

    Raises:
        ConfigError: if no layout is possible, with the reasons.
    """
    bound, state = Bound(request), _State()
    groups = list(layout_candidates(request, bound.comm_type))
    order = count()
    waiting: list[tuple[float, int, CandidateGroup | LayoutCandidate]] = [
        (bound.least(group), next(order), group) for group in groups
    ]
    heapify(waiting)
    while waiting:
        least, _, entry = heappop(waiting)
        if state.is_beaten(least, top):
            break
        if isinstance(entry, CandidateGroup):
            most_frugal = _memory(request, next(_more_frugal(request, entry.first)), state)
            for candidate in entry if most_frugal is None or most_frugal.fits else ():
                heappush(waiting, (max(least, bound.seconds(candidate)), next(order), candidate))
            continue
        share = _least_share(request, entry, state)
        if not share or not state.is_beaten(bound.seconds(entry, share), top):
            _look_at(request, entry, least, state)
    if not state.best and state.closest is None:
        raise impossible(request)
    plans = sorted(state.best.values(), key=step_seconds)
    looked_at = sum(plan is not None for plan in state.memories.values())
    closest = None if plans or state.closest is None else plan_of(state.closest.job, request.limit, request.device)
    return Found(tuple(plans[:top]), sum(map(len, groups)), looked_at, closest)


def step_seconds(plan: Plan) -> float:
    """Predicted time of a step; all plans of one search take the same tokens."""
    return float("inf") if plan.time is None else plan.time.step


def _least_share(request: PlanRequest, candidate: LayoutCandidate, state: _State) -> float:
    """Smallest share of layers to recompute for a candidate to fit; 0 if its memory without recomputation is unknown.

    Recomputing all layers saves at most the bytes that all layers keep.
    """
    plain = candidate.without_recompute
    frugal = plain._replace(vpp=1, schedule=None, micro_batch_size=1)
    known = next((plan for each in (plain, frugal) if (plan := state.memories.get(each)) is not None), None)
    if candidate.recompute != "full" or known is None:
        return 0.0
    kept = sum(known.memory.by_cause.get(cause, 0) for cause in OF_LAYERS)
    return min(1.0, max(0.0, (known.memory.peak - request.limit) / kept)) if kept else 0.0


def _look_at(request: PlanRequest, candidate: LayoutCandidate, least: float, state: _State) -> None:
    """Predict the memory of one candidate and, if it fits, its time."""
    plain = candidate.without_recompute
    if least >= state.fitting.get(plain, float("inf")):
        return
    for frugal in _more_frugal(request, candidate):
        plan = _memory(request, frugal, state)
        if plan is not None and not plan.fits:
            return
    plan = _memory(request, candidate, state)
    if plan is None or not plan.fits:
        return
    plan = _with_fewest_layers(request, candidate, plan, state) or plan
    plan = replace(plan, time=time_of(plan.job, request.device))
    seconds = step_seconds(plan)
    nothing_is_faster = candidate.recompute is None
    state.fitting[plain] = 0.0 if nothing_is_faster else min(seconds, state.fitting.get(plain, seconds))
    state.timed += 1
    state.lowest_ratio = min(state.lowest_ratio, seconds / least)
    ranks = candidate.ranks
    if ranks not in state.best or seconds < step_seconds(state.best[ranks]):
        state.best[ranks] = plan


def _with_fewest_layers(request: PlanRequest, candidate: LayoutCandidate, whole: Plan, state: _State) -> Plan | None:
    """The plan that recomputes the fewest layers of each stage and fits; ``None`` if only all layers are enough.

    Every recomputed layer saves about the same, so the memory with none and with all of them gives the first guess.
    """
    choices = with_fewer_layers(request, candidate)
    plain = _memory(request, candidate.without_recompute, state) if choices else None
    if plain is None:
        return None
    saved, missing = plain.memory.peak - whole.memory.peak, plain.memory.peak - request.limit
    first = ceil(missing / saved * (len(choices) + 1)) if saved > 0 else 1
    for choice in choices[max(0, first - 1) :]:
        plan = _memory(request, choice, state)
        if plan is not None and plan.fits:
            return plan
    return None


def _more_frugal(request: PlanRequest, candidate: LayoutCandidate) -> Iterator[LayoutCandidate]:
    """Candidates that need at most the same memory, the most frugal first; many candidates share them."""
    plain = candidate._replace(vpp=1, schedule=None, recomputed=None)
    yield plain._replace(micro_batch_size=1, recompute=request.fixed.get("recompute", "full"))
    yield plain._replace(micro_batch_size=1)
    yield plain


def _memory(request: PlanRequest, candidate: LayoutCandidate, state: _State) -> Plan | None:
    """The memory of a candidate; ``None`` if it is impossible."""
    if candidate in state.memories:
        return state.memories[candidate]
    try:
        job = job_of_candidate(request, candidate)
    except ConfigError:
        state.memories[candidate] = None
        return None
    plan = Plan(job, *worst_memory(job, kernels_of(request.device), request.limit), request.limit, None)
    state.memories[candidate] = plan
    if not plan.fits and (state.closest is None or plan.memory.peak < state.closest.memory.peak):
        state.closest = plan
    return plan
