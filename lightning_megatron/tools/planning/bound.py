"""Lower bound of a candidate's step time, computed in microseconds, so that a search tries promising ones first."""

from __future__ import annotations

import math

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.recompute_plan import RecomputePlan
from lightning_megatron.errors import ConfigError
from lightning_megatron.tools.planning.candidates import CandidateGroup, LayoutCandidate, comm_types
from lightning_megatron.tools.planning.core.job import PlannedJob
from lightning_megatron.tools.planning.request import PlanRequest
from lightning_megatron.tools.planning.time.step import time_of

_OF_A_MICRO_BATCH = ("compute", "recompute", "tp", "cp", "ep")
"""Causes of time that every micro-batch has."""


class Bound:
    """Lower bounds of step times: layers, without pipeline bubble, messages, gradient reduction and optimizer.

    The time of one micro-batch through all layers depends on few of the sizes, and is predicted once for each choice of
    them. It is divided over the pipeline ranks: the busiest one has at least the mean.

    Args:
        request: model, devices and batches.
    """

    def __init__(self, request: PlanRequest) -> None:
        self._request = request
        self._micro_batches: dict[tuple[object, ...], float | None] = {}

    def seconds(self, candidate: LayoutCandidate) -> float:
        """Least time of a step; infinite for a candidate that is impossible."""
        whole = self._of_candidate(candidate, candidate.recompute)
        if whole is None:
            return math.inf
        if candidate.recomputed is not None:
            share = candidate.recomputed * candidate.pp * candidate.vpp / self._request.config.num_layers
            least = self._of_candidate(candidate, None) or 0.0
            whole = least + (whole - least) * min(1.0, share)
        return self._of_step(candidate, whole / candidate.micro_batch_size)

    def least(self, group: CandidateGroup) -> float:
        """A bound of all candidates of a group: a sample takes least time in the largest micro-batch."""
        largest = group.micro_batch_sizes[-1]
        whole = self._of_candidate(group.first._replace(micro_batch_size=largest), group.first.recompute)
        return 0.0 if whole is None else self._of_step(group.first, whole / largest)

    def _of_step(self, candidate: LayoutCandidate, sample: float) -> float:
        """Seconds of a step from those of one sample through the whole model."""
        return sample / candidate.pp * (self._request.global_batch_size // candidate.dp)

    def comm_type(self, tp: int, cp: int) -> str:
        """The fastest communication of context-parallel attention, which all candidates with these sizes use."""
        known = comm_types(self._request, tp, cp)
        seconds = [self._micro_batch(tp, cp, 1, tp, comm, 1, None) for comm in known]
        return min(zip(seconds, known, strict=True), key=lambda each: math.inf if each[0] is None else each[0])[1]

    def _of_candidate(self, candidate: LayoutCandidate, recompute: str | None) -> float | None:
        """Seconds of one micro-batch of a candidate through the whole model, with another recomputation."""
        sizes = candidate.tp, candidate.cp, candidate.ep, candidate.etp
        return self._micro_batch(*sizes, candidate.cp_comm_type, candidate.micro_batch_size, recompute)

    def _micro_batch(
        self, tp: int, cp: int, ep: int, etp: int, comm: str, samples: int, recompute: str | None
    ) -> float | None:
        """Seconds of one micro-batch through the whole model; ``None`` if that is impossible."""
        key = (tp, cp, ep, etp, comm, samples, recompute)
        if key not in self._micro_batches:
            replicas = math.lcm(ep * etp, tp * cp) // (tp * cp)
            layout = ParallelLayout(tp, 1, cp, ep, etp, replicas, cp_comm_type=comm)
            self._micro_batches[key] = self._timed(layout, samples, recompute)
        return self._micro_batches[key]

    def _timed(self, layout: ParallelLayout, samples: int, recompute: str | None) -> float | None:
        request = self._request
        try:
            job = PlannedJob(
                request.config,
                layout,
                request.seq_length,
                samples,
                1,
                precision=request.precision,
                fp8=request.fp8,
                recompute=RecomputePlan(recompute),
                attention=request.attention,
            )
        except ConfigError:
            return None
        causes = time_of(job, request.device).by_cause
        return sum(causes[name] for name in _OF_A_MICRO_BATCH)
