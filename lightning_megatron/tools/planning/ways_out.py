"""Ways out of too little memory: the smallest changes of a job that make it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.recompute_plan import RecomputePlan
from lightning_megatron.errors import ConfigError
from lightning_megatron.machine.byte_size import told_bytes
from lightning_megatron.pipeline.partition import BALANCED, LayerSplit
from lightning_megatron.pipeline.schedule import schedule_kind
from lightning_megatron.tools.planning.core.device_file import DeviceSpec
from lightning_megatron.tools.planning.core.job import PlannedJob
from lightning_megatron.tools.planning.plan import Plan, plan_of
from lightning_megatron.tools.planning.settings import strategy_arguments

MOST_CHANGES = 5
MOST_JOBS = 400
"""Largest number of jobs whose memory is predicted."""


@dataclass(frozen=True)
class WayOut:
    """A changed job that fits.

    Attributes:
        plan: the changed job.
        changes: arguments of the strategy, and of the data, that change, with their new values.
        number: number of single changes.
    """

    plan: Plan
    changes: dict[str, Any]
    number: int

    def __str__(self) -> str:
        told = ", ".join(f"{name}={value!r}" for name, value in self.changes.items())
        return f"{told} ({told_bytes(self.plan.memory.peak)})"


def ways_out(job: PlannedJob, limit: int, device: DeviceSpec | None = None, count: int = 3) -> list[WayOut]:
    """The cheapest changes that make a job fit on the same number of devices, with the same global batch.

    Jobs with one change are tried first, then those with two, and so on until enough fit. They are ordered by their
    predicted time if the device is known, else by the number of changes, then by memory, the largest first. A way
    that contains all changes of another one is left out.

    Args:
        job: job that does not fit.
        limit: bytes that tensors of a rank may take.
        device: device whose predicted times order the ways; ``None`` if unknown.
        count: number of ways.
    """
    seen, row, found, looked_at = {job}, [job], [], 0
    for number in range(1, MOST_CHANGES + 1):
        following: list[tuple[int, PlannedJob]] = []
        for before in row:
            for changed in _neighbours(before):
                if changed in seen or looked_at >= MOST_JOBS:
                    continue
                seen.add(changed)
                looked_at += 1
                plan = plan_of(changed, limit, device, timed=False)
                if plan.fits:
                    found.append(WayOut(plan_of(changed, limit, device), _changes(job, changed), number))
                else:
                    following.append((plan.memory.peak, changed))
        if len(found) >= count or looked_at >= MOST_JOBS:
            break
        row = [changed for _, changed in sorted(following, key=lambda each: each[0])[:40]]
    return _distinct(sorted(found, key=_cost))[:count]


def _cost(way: WayOut) -> tuple[float, ...]:
    time = way.plan.time
    return (way.number, -way.plan.memory.peak) if time is None else (time.step,)


def _distinct(ways: list[WayOut]) -> list[WayOut]:
    """Ways without those that contain all changes of another one."""
    return [way for way in ways if not any(other.changes.items() < way.changes.items() for other in ways)]


def _changes(before: PlannedJob, after: PlannedJob) -> dict[str, Any]:
    old, new = _told(before), _told(after)
    defaults = {"recompute": None, "distributed_optimizer": True, "sequence_parallel": None, "etp": None}
    names = dict.fromkeys([*new, *old])
    return {name: new.get(name, defaults.get(name, 1)) for name in names if old.get(name) != new.get(name)}


def _told(job: PlannedJob) -> dict[str, Any]:
    samples = job.micro_batch_size * job.num_micro_batches
    return {**strategy_arguments(job), "batch_size": samples}


def _neighbours(job: PlannedJob) -> Iterator[PlannedJob]:
    """Jobs with one change that may save memory; those that are impossible are left out."""
    for change in _single_changes(job):
        try:
            yield replace(job, **change)
        except ConfigError:
            continue


def _single_changes(job: PlannedJob) -> Iterator[dict[str, Any]]:
    layout = job.layout
    if not job.distributed_optimizer:
        yield {"distributed_optimizer": True}
    if layout.tp > 1 and not layout.uses_sequence_parallel:
        yield {"layout": replace(layout, sequence_parallel=True)}
    for granularity in _more_recompute(job):
        yield {"recompute": RecomputePlan(granularity)}
    if job.schedule not in (None, schedule_kind(None, layout.vpp).name):
        yield {"schedule": None}
    if layout.vpp > 1:
        yield {"layout": replace(layout, vpp=1), "schedule": None}
    if job.micro_batch_size > 1:
        smaller = max(size for size in range(1, job.micro_batch_size) if job.micro_batch_size % size == 0)
        yield {
            "micro_batch_size": smaller,
            "num_micro_batches": job.num_micro_batches * job.micro_batch_size // smaller,
        }
    yield from _other_layouts(job)


def _more_recompute(job: PlannedJob) -> Iterator[str]:
    granularity = job.recompute.granularity
    if granularity == "full":
        if job.recompute.method == "block" or job.recompute.num_layers > 1:
            yield "full"
        return
    if granularity is None and job.attention == "reference":
        yield "selective"
    if job.config.num_experts and granularity != "moe":
        yield "moe"
    yield "full"


def _other_layouts(job: PlannedJob) -> Iterator[dict[str, Any]]:
    """Twice the ranks on one axis, with half the data parallelism; or experts distributed over twice the ranks."""
    layout, dp = job.layout, job.layout.data_parallel_size
    if layout.ep * 2 <= job.config.num_experts:
        yield {"layout": replace(layout, ep=2 * layout.ep)}
    if dp % 2:
        return
    micros = 2 * job.num_micro_batches
    for name in ("tp", "pp", "cp"):
        wider = replace(layout, **{name: 2 * getattr(layout, name), "dp": dp // 2})
        if name == "tp":
            wider = _with_tp(job.layout, wider)
        change: dict[str, Any] = {"layout": wider, "num_micro_batches": micros}
        if name == "pp" and job.split.is_even and job.config.num_layers % (wider.pp * wider.vpp):
            change["split"] = LayerSplit(layout=BALANCED)
        yield change


def _with_tp(before: ParallelLayout, after: ParallelLayout) -> ParallelLayout:
    """The layout ``after``, whose tp differs, with etp and sequence parallelism adjusted as their defaults would be."""
    follows = before.expert_tensor_parallel_size == before.tp
    keeps = before.uses_sequence_parallel or before.tp == 1
    return replace(after, etp=after.tp if follows else before.etp, sequence_parallel=keeps)
