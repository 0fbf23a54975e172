"""Search for the fastest layouts that fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import count, islice

from lightning_megatron.errors import ConfigError
from lightning_megatron.tools.planning.bound import Bound
from lightning_megatron.tools.planning.candidates import (
    CandidateGroup,
    LayoutCandidate,
    impossible,
    job_of_candidate,
    layout_candidates,
    recomputes,
    with_fewer_layers,
)
from lightning_megatron.tools.planning.memory.half import OF_LAYERS
from lightning_megatron.tools.planning.memory.peak import worst_memory
from lightning_megatron.tools.planning.plan import Plan, communicator_bytes, kernels_of, plan_of
from lightning_megatron.tools.planning.request import PlanRequest
from lightning_megatron.tools.planning.time.step import TimeEstimate, time_of


@dataclass(frozen=True)
class Found:
    """Layouts of a search.

    Attributes:
        plans: the fastest layouts that fit, by predicted tokens/s; one for each combination of axis sizes.
        possible: number of candidates.
        timed: number of candidates whose time was computed.
        looked_at: number of candidates whose memory was computed.
        closest: the layout that needs least memory, if none fits.
    """

    plans: tuple[Plan, ...]
    possible: int
    timed: int
    looked_at: int
    closest: Plan | None = None


def search(request: PlanRequest, top: int = 5) -> Found:
    """The fastest layouts that fit, one for each combination of axis sizes.

    They are found in the order of their predicted times: ``top`` says when the search stops, and changes nothing else.

    Args:
        request: model, devices and batches.
        top: number of layouts.

    Raises:
        ConfigError: if no layout is possible, with the reasons.
    """
    run = _Search(request)
    plans = tuple(islice(run.fastest_first(), top))
    if not plans and run.closest is None:
        raise impossible(request)
    closest = None if plans or run.closest is None else plan_of(run.closest.job, request.limit, request.device)
    looked_at = sum(plan is not None for plan in run.memories.values())
    return Found(plans, sum(map(len, run.groups)), len(run.times), looked_at, closest)


def step_seconds(plan: Plan) -> float:
    """Predicted time of a step; all plans of one search take the same tokens."""
    return float("inf") if plan.time is None else plan.time.step


class _Search:
    """A search that yields layouts in the order of their predicted times.

    Groups of candidates and candidates wait in one heap, each with a time that none of its layouts can beat: a lower
    bound (:class:`Bound`) first, then, for one candidate, its predicted time. What comes out with its predicted time
    and fits is the fastest layout left. Most groups are never taken apart, and the memory of few layouts is computed.
    Recomputation is looked at where a candidate does not fit without it.

    Attributes:
        groups: every candidate.
        memories: plans without a time, by candidate; ``None`` for one that is impossible.
        times: predicted times, by candidate.
        closest: layout with least memory of those that do not fit.
    """

    def __init__(self, request: PlanRequest) -> None:
        self._request = request
        self._bound = Bound(request)
        self.groups = list(layout_candidates(request, self._bound.comm_type))
        self.memories: dict[LayoutCandidate, Plan | None] = {}
        self.times: dict[LayoutCandidate, TimeEstimate] = {}
        self.closest: Plan | None = None

    def fastest_first(self) -> Iterator[Plan]:
        """Layouts that fit, the fastest first, one for each combination of axis sizes."""
        order, found = count(), set[tuple[int, ...]]()
        waiting: list[tuple[float, int, CandidateGroup | LayoutCandidate]] = [
            (self._bound.least(group), next(order), group) for group in self.groups
        ]
        heapify(waiting)
        while waiting:
            least, _, entry = heappop(waiting)
            if entry.ranks in found:
                continue
            if isinstance(entry, CandidateGroup):
                following = self._members(entry)
            elif not self._frugal_fit(entry):
                following = self._recomputing(entry)
            elif entry not in self.times:
                following = self._with_time(entry)
            elif (plan := self._memory(entry)) is None or not plan.fits:
                following = self._recomputing(entry)
            else:
                found.add(entry.ranks)
                yield replace(plan, time=self.times[entry])
                continue
            for seconds, candidate in following:
                heappush(waiting, (max(least, seconds), next(order), candidate))

    def _members(self, group: CandidateGroup) -> Iterator[tuple[float, LayoutCandidate]]:
        """Candidates of a group with the least recomputation, with their bounds; none if no member fits."""
        most_frugal = self._memory(next(_more_frugal(self._request, group.first)))
        for micro in group.micro_batch_sizes if most_frugal is None or most_frugal.fits else ():
            candidate = group.first._replace(micro_batch_size=micro)
            yield self._bound.seconds(candidate), candidate

    def _with_time(self, candidate: LayoutCandidate) -> Iterator[tuple[float, LayoutCandidate]]:
        """A candidate with its predicted time; none if it is impossible."""
        try:
            job = job_of_candidate(self._request, candidate)
        except ConfigError:
            return
        self.times[candidate] = time_of(job, self._request.device)
        yield self.times[candidate].step, candidate

    def _recomputing(self, candidate: LayoutCandidate) -> Iterator[tuple[float, LayoutCandidate]]:
        """Ways to recompute more, with their bounds, of a candidate that does not fit."""
        least, *more = recomputes(self._request)
        following = []
        if candidate.recompute == least:
            ways = [candidate._replace(recompute=recompute) for recompute in more]
            following = [
                self._with_layers(way, self._fewest_layers(way)) if way.recompute == "full" else way for way in ways
            ]
        elif candidate.recomputed is not None:
            following = [self._with_layers(candidate, candidate.recomputed + 1)]
        for each in following:
            yield self._bound.seconds(each), each

    def _with_layers(self, candidate: LayoutCandidate, number: int) -> LayoutCandidate:
        """A full-recompute candidate that recomputes this number of layers of each stage, or all of fewer."""
        whole = candidate._replace(recomputed=None)
        choices = [*with_fewer_layers(self._request, whole), whole]
        return choices[min(number, len(choices)) - 1]

    def _fewest_layers(self, candidate: LayoutCandidate) -> int:
        """Smallest number of layers to recompute in a stage for a candidate to fit.

        Recomputing all layers saves at most the bytes that all layers keep.
        """
        plain = candidate.without_recompute
        frugal = plain._replace(vpp=1, schedule=None, micro_batch_size=1)
        known = next((plan for each in (plain, frugal) if (plan := self.memories.get(each)) is not None), None)
        kept = 0 if known is None else sum(known.memory.by_cause.get(cause, 0) for cause in OF_LAYERS)
        if known is None or not kept:
            return 1
        layers = sum(len(stage.layers) for stage in known.job.stages_of(known.pipeline_rank)) / candidate.vpp
        return max(1, int(layers * (known.memory.peak - self._request.limit) / kept))

    def _frugal_fit(self, candidate: LayoutCandidate) -> bool:
        """True unless a candidate that needs less memory does not fit; many candidates share those."""
        frugal = map(self._memory, _more_frugal(self._request, candidate))
        return not any(plan is not None and not plan.fits for plan in frugal)

    def _memory(self, candidate: LayoutCandidate) -> Plan | None:
        """The memory of a candidate; ``None`` if it is impossible."""
        if candidate in self.memories:
            return self.memories[candidate]
        request = self._request
        try:
            job = job_of_candidate(request, candidate)
        except ConfigError:
            self.memories[candidate] = None
            return None
        taken = communicator_bytes(job, request.device)
        limit = request.limit - taken
        plan = Plan(job, *worst_memory(job, kernels_of(request.device), limit), limit, None, taken)
        self.memories[candidate] = plan
        if not plan.fits and (self.closest is None or plan.memory.peak < self.closest.memory.peak):
            self.closest = plan
        return plan


def _more_frugal(request: PlanRequest, candidate: LayoutCandidate) -> Iterator[LayoutCandidate]:
    """Candidates that need at most the same memory, the most frugal first; many candidates share them."""
    plain = candidate._replace(vpp=1, schedule=None, recomputed=None)
    yield plain._replace(micro_batch_size=1, recompute=request.fixed.get("recompute", "full"))
    yield plain._replace(micro_batch_size=1)
    yield plain
