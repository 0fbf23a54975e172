"""Settings of the strategy, built once from its public arguments and passed on as values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, Literal

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.recompute_plan import RecomputePlan, recompute_problems
from lightning_megatron.errors import raise_if_any
from lightning_megatron.lightning.step.grad_reduction import GradReduceDtype, MainGradsDtype
from lightning_megatron.ops.fp8 import Fp8Recipe
from lightning_megatron.optim.core.config import DistributedOptimizerConfig
from lightning_megatron.pipeline.partition import LayerSplit
from lightning_megatron.pipeline.schedule import PipelineSchedule, schedule_problems

CPCommType = Literal["p2p", "all_gather", "a2a"]


@dataclass(frozen=True)
class JobSettings:
    """Settings of a strategy; fields without a text here are arguments of :class:`MegatronStrategy`, as given."""

    layout: ParallelLayout
    """Number of ranks of each kind of parallelism; the number of data-parallel ranks is still open."""

    split: LayerSplit
    """Layers of each pipeline stage."""

    recompute: RecomputePlan
    """Activations that are recomputed."""

    optimizer: DistributedOptimizerConfig = field(default_factory=DistributedOptimizerConfig)
    """Switches of the distributed optimizer; dtypes are set when training begins."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """All arguments of the constructor, as given."""

    pipeline_schedule: PipelineSchedule | None = None
    micro_batch_size: int | None = None
    main_grads_dtype: MainGradsDtype | None = None
    grad_reduce_dtype: GradReduceDtype | None = None
    broadcast_predictions: bool = True
    compile: bool | str = False
    gpu_migration: bool = False
    ops: dict[str, str] | str | None = None
    fp8: Fp8Recipe | None = None
    check_for_nan_in_loss_and_grad: bool = True
    verify_on_load: bool = True
    save_distributed_checkpoint: bool = True
    async_save: bool = False
    save_on_signal: bool = True
    record_actions: bool = True
    process_group_backend: str | None = None
    timeout: timedelta | None = None
    max_memory: int | str | None = None
    may_differ: Sequence[str] | None = None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> JobSettings:
        """The settings for arguments of the constructor.

        Raises:
            ConfigError: for sizes that cannot work, whatever the number of devices.
        """
        layout = ParallelLayout(**_named(ParallelLayout, arguments))
        split = LayerSplit(**_named(LayerSplit, arguments), layout=arguments["pipeline_layout"])
        recompute = arguments["recompute"], arguments["recompute_method"], arguments["recompute_num_layers"]
        shard_saved = arguments["recompute_shard_saved"]
        found = schedule_problems(arguments["pipeline_schedule"], layout.pp, layout.vpp, 1)
        raise_if_any(found + recompute_problems(*recompute, shard_saved, layout))
        plan = RecomputePlan(*recompute, shard_saved)
        optimizer = DistributedOptimizerConfig(
            shard=arguments["distributed_optimizer"],
            elementwise=tuple(arguments["elementwise_optimizers"] or ()),
            **_named(DistributedOptimizerConfig, arguments),
        )
        parts = {"layout": layout, "split": split, "recompute": plan, "optimizer": optimizer, "arguments": arguments}
        return cls(**_named(cls, arguments) | parts)


def _named(kind: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that have the name of a field of a dataclass."""
    return {name: arguments[name] for name in (each.name for each in fields(kind)) if name in arguments}
