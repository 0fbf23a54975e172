"""Planned jobs from arguments of the strategy, and arguments of the strategy from planned jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.recompute_plan import RecomputePlan
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import Problem, divisors, nearest_to, raise_if_any
from lightning_megatron.pipeline.partition import LayerSplit
from lightning_megatron.tools.planning.core.job import PlannedJob

_LAYOUT = ("tp", "pp", "cp", "ep", "etp", "vpp", "sequence_parallel", "cp_comm_type")
SPLIT_ARGUMENTS = {
    "first_stage_layers": "first_stage_layers",
    "last_stage_layers": "last_stage_layers",
    "count_embedding": "count_embedding",
    "count_loss": "count_loss",
    "pipeline_layout": "layout",
}
"""Arguments of the strategy that say which stage has which layers, with the names of fields of ``LayerSplit``."""
_RECOMPUTE = {
    "recompute": "granularity",
    "recompute_method": "method",
    "recompute_num_layers": "num_layers",
    "recompute_shard_saved": "shard_saved",
}
_SWITCHES = (
    *("distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"),
    *("main_grads_dtype", "grad_reduce_dtype", "bucket_size"),
)


@dataclass(frozen=True)
class Feed:
    """Samples that a run feeds to the devices of a job.

    Attributes:
        world_size: devices of the job.
        seq_length: tokens of a sample.
        batch_size: samples of one batch of one data-parallel replica's loader.
        accumulated: batches of one optimizer step.
        precision: precision by Lightning's name.
    """

    world_size: int
    seq_length: int
    batch_size: int
    accumulated: int = 1
    precision: str = "bf16-mixed"


def job_of(config: TransformerConfig, feed: Feed, arguments: Mapping[str, Any], **other: Any) -> PlannedJob:
    """The job of a strategy with these arguments.

    Args:
        feed: samples and devices.
        arguments: arguments of ``MegatronStrategy``; those that change neither memory nor time are ignored.
        **other: further fields of the planned job, such as ``attention``.

    Raises:
        ConfigError: with every fault.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    layout = ParallelLayout(**{name: given[name] for name in _LAYOUT if name in given})
    split = LayerSplit(**{ours: given[name] for name, ours in SPLIT_ARGUMENTS.items() if name in given})
    recompute = RecomputePlan(**{ours: given[name] for name, ours in _RECOMPUTE.items() if name in given})
    micro = given.get("micro_batch_size", feed.batch_size)
    found = layout.problems(world_size=feed.world_size)
    if feed.batch_size % micro:
        reason = f"a batch of {feed.batch_size} samples does not split into micro-batches of {micro}"
        found.append(Problem("micro_batch_size", micro, reason, nearest_to(micro, divisors(feed.batch_size))))
    raise_if_any(found)
    return PlannedJob(
        config,
        layout.resolve(feed.world_size),
        feed.seq_length,
        micro,
        feed.batch_size // micro * feed.accumulated,
        precision=feed.precision,
        schedule=given.get("pipeline_schedule"),
        split=split,
        recompute=recompute,
        **{name: given[name] for name in _SWITCHES if name in given},
        **other,
    )


def strategy_arguments(job: PlannedJob) -> dict[str, Any]:
    """Arguments of ``MegatronStrategy`` for a job; those that are the strategy's defaults are left out."""
    layout, split, recompute = job.layout, job.split, job.recompute
    found: dict[str, Any] = {
        name: size for name in ("tp", "pp", "vpp", "cp", "ep") if (size := getattr(layout, name)) > 1
    }
    if layout.expert_tensor_parallel_size != layout.tp:
        found["etp"] = layout.expert_tensor_parallel_size
    if layout.uses_sequence_parallel != (layout.tp > 1):
        found["sequence_parallel"] = layout.uses_sequence_parallel
    if layout.cp > 1 and layout.cp_comm_type != "p2p":
        found["cp_comm_type"] = layout.cp_comm_type
    found["micro_batch_size"] = job.micro_batch_size
    if job.schedule is not None:
        found["pipeline_schedule"] = job.schedule
    found |= _changed(split, LayerSplit(), SPLIT_ARGUMENTS) | _changed(recompute, RecomputePlan(), _RECOMPUTE)
    defaults = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    return found | {name: value for name in _SWITCHES if (value := getattr(job, name)) != defaults.get(name)}


def _changed(given: object, default: object, names: Mapping[str, str]) -> dict[str, Any]:
    """Fields other than those of a default, by argument; lists for tuples, which YAML does not have."""
    values = {name: getattr(given, ours) for name, ours in names.items()}
    changed = {name: value for name, value in values.items() if value != getattr(default, names[name])}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in changed.items()}


def layout_words(job: PlannedJob) -> str:
    """The layout of a job as arguments of the strategy, with the number of replicas: ``tp=8, micro_batch_size=1``."""
    given = ", ".join(f"{name}={value!r}" for name, value in strategy_arguments(job).items())
    return f"{given} (dp {job.layout.data_parallel_size})"
