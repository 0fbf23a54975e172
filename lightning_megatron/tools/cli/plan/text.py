"""Plans as text, as JSON, and as a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lightning_megatron.tools.planning.core.communicators import num_communicators
from lightning_megatron.tools.planning.core.device_file import DeviceSpec
from lightning_megatron.tools.planning.core.job import PlannedJob
from lightning_megatron.tools.planning.core.term import Term
from lightning_megatron.tools.planning.plan import ALLOCATOR_KEEPS, Plan
from lightning_megatron.tools.planning.request import PlanRequest
from lightning_megatron.tools.planning.search import Found
from lightning_megatron.tools.planning.settings import layout_words, strategy_arguments
from lightning_megatron.tools.planning.ways_out import WayOut

GIB = 2**30
_SHOWN = 0.005
"""Share of the whole below which a cause is counted among "other"."""


def heading(request: PlanRequest, name: str) -> str:
    """The request in one line."""
    billions = request.config.num_parameters() / 1e9
    return (
        f"{name}: {billions:.2f} B parameters on {request.num_devices} x {request.device.title}; a step of "
        f"{request.global_batch_size} samples of {request.seq_length} tokens, {request.precision}"
        f"{', fp8' if request.fp8 else ''}"
    )


def found_text(found: Found, request: PlanRequest) -> Iterator[str]:
    """Lines of a search."""
    yield (
        f"{found.possible} layouts looked through, memory of {found.looked_at} predicted, time of {found.timed}; "
        f"tensors of a rank may take {request.limit / GIB:.1f} GiB"
    )
    if found.closest is not None:
        yield "none fits; the one that needs least:"
        yield from plan_text(found.closest, request.device)
    for number, plan in enumerate(found.plans, 1):
        yield ""
        yield f"{number}. {layout_words(plan.job)}"
        yield from (f"   {line}" for line in plan_text(plan, request.device, titled=False))


def plan_text(plan: Plan, device: DeviceSpec | None, *, titled: bool = True) -> Iterator[str]:
    """Lines of one plan: layout (if ``titled``), speed, its caveat, memory by cause, time by cause."""
    if titled:
        yield layout_words(plan.job)
    time, memory = plan.time, plan.memory
    if time is not None:
        each = time.tokens_per_second / plan.job.world_size
        yield (
            f"{time.tokens_per_second:,.0f} tokens/s, {each:,.0f} a device, MFU {time.mfu:.1%}, "
            f"{time.step:.3g} s a step"
        )
        if device is not None and device.caveat:
            yield f"caveat: {device.caveat}"
    where = f" on pipeline rank {plan.pipeline_rank}" if plan.job.layout.pp > 1 else ""
    limit = "" if plan.limit is None else f" of {plan.limit / GIB:.1f}"
    yield f"memory {memory.peak / GIB:.2f} GiB{limit}{where}, most in {memory.moment}"
    if plan.communicator_bytes:
        number = num_communicators(plan.job.layout)
        yield f"{number} communicators of NCCL take {plan.communicator_bytes / GIB:.1f} GiB more (published: 0.5 each)"
    if plan.is_tight:
        least, most = ALLOCATOR_KEEPS
        yield f"tight: allocators keep {least:.0%} to {most:.0%} more than this; lower --max-memory for them"
    yield f"  GiB: {by_cause({name: size / GIB for name, size in memory.by_cause.items()})}"
    if time is not None:
        yield f"  s:   {by_cause(time.by_cause)}"


def by_cause(values: Mapping[str, float]) -> str:
    """Causes with their values, largest first, small ones together."""
    whole = sum(values.values())
    large = {name: value for name, value in values.items() if value > _SHOWN * whole}
    told = [f"{name} {value:.3g}" for name, value in sorted(large.items(), key=lambda item: -item[1])]
    rest = whole - sum(large.values())
    return ", ".join([*told, f"other {rest:.2g}"] if rest > 0 else told)


def verdict(plan: Plan, ways: list[WayOut], device: DeviceSpec | None) -> Iterator[str]:
    """Lines about one given layout: it fits or does not, the largest cause, and the nearest layouts that fit."""
    yield from plan_text(plan, device)
    memory, cause = plan.memory, plan.memory.largest_cause
    size = f"{memory.by_cause[cause] / GIB:.2f} GiB"
    if plan.fits:
        yield f"fits; most is {cause}, {size}"
        return
    assert plan.limit is not None
    yield f"does not fit: {(memory.peak - plan.limit) / GIB:.2f} GiB too much; most is {cause}, {size}"
    yield "nearest that fit:" if ways else "no layout near it fits: take more devices"
    for way in ways:
        yield f"  - {way}{_slower(plan, way)}"


def _slower(plan: Plan, way: WayOut) -> str:
    if plan.time is None or way.plan.time is None:
        return ""
    return f", {way.plan.time.tokens_per_second / plan.time.tokens_per_second:.2f} times the tokens/s"


def explained(plan: Plan) -> Iterator[str]:
    """The formula of every term, with its value."""
    yield "memory"
    yield from map(_term, plan.memory.terms)
    if plan.time is not None:
        yield "time"
        yield from map(_term, plan.time.terms)


def _term(term: Term) -> str:
    value = f"{term.value / GIB:.4g} GiB" if term.unit == "bytes" else f"{term.value:.4g} {term.unit}"
    return f"  {term.name:<28} {value:>12}  = {term.formula}"


def as_data(plan: Plan, device: DeviceSpec | None) -> dict[str, Any]:
    """A plan for JSON: bytes, seconds, arguments of the strategy."""
    time = plan.time
    return {
        "strategy": strategy_arguments(plan.job),
        "data_parallel": plan.job.layout.data_parallel_size,
        "num_micro_batches": plan.job.num_micro_batches,
        "fits": plan.fits,
        "tight": plan.is_tight,
        "limit_bytes": plan.limit,
        "communicator_bytes": plan.communicator_bytes,
        "memory_bytes": plan.memory.peak,
        "memory_after_step_bytes": plan.memory.after_step,
        "memory_moment": plan.memory.moment,
        "memory_by_cause_bytes": dict(plan.memory.by_cause),
        "pipeline_rank": plan.pipeline_rank,
        "step_seconds": None if time is None else time.step,
        "seconds_by_cause": None if time is None else dict(time.by_cause),
        "tokens_per_second": None if time is None else time.tokens_per_second,
        "mfu": None if time is None else time.mfu,
        "time_caveat": None if device is None else device.caveat,
    }


def recipe_text(job: PlannedJob, devices_per_node: int) -> str:
    """A YAML recipe with the strategy of a job, to be given after another recipe."""
    import yaml

    nodes = max(1, job.world_size // devices_per_node)
    trainer = {
        "devices": job.world_size // nodes,
        "num_nodes": nodes,
        "strategy": {"class_path": "lightning_megatron.MegatronStrategy", "init_args": strategy_arguments(job)},
        "precision": job.precision,
    }
    data = {
        "class_path": "MegatronDataModule",
        "init_args": {"seq_length": job.seq_length, "batch_size": job.micro_batch_size * job.num_micro_batches},
    }
    return yaml.safe_dump({"trainer": trainer, "data": data}, sort_keys=False)
