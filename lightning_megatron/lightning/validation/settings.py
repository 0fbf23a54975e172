"""Settings of the strategy, built once from its public arguments and handed on as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.recompute_plan import RecomputePlan
from lightning_megatron.lightning.step.grad_reduction import GradReduceDtype
from lightning_megatron.ops.fp8 import Fp8Recipe
from lightning_megatron.optim.core.config import DistributedOptimizerConfig
from lightning_megatron.pipeline.partition import LayerSplit
from lightning_megatron.pipeline.schedule import PipelineSchedule

CPCommType = Literal["p2p", "all_gather", "a2a"]


@dataclass(frozen=True)
class LightningParts:
    """Objects that any strategy of Lightning may be given, or gets from the Trainer.

    Attributes:
        accelerator: accelerator; ``None`` for the Trainer's.
        parallel_devices: devices of this node; ``None`` for the Trainer's.
        cluster_environment: cluster environment; ``None`` for the Trainer's.
        precision_plugin: precision plugin; ``None`` for the Trainer's.
    """

    accelerator: Accelerator | None = None
    parallel_devices: list[torch.device] | None = None
    cluster_environment: ClusterEnvironment | None = None
    precision_plugin: Precision | None = None


@dataclass(frozen=True)
class SavingSettings:
    """Settings of checkpoints; arguments of ``MegatronStrategy`` explain them.

    Attributes:
        run_async: True if checkpoints are written in the background.
        verify_on_load: True if the content of files is compared with the manifest, not only their length.
        on_signal: True if a signal ends the run after a save.
    """

    run_async: bool = False
    verify_on_load: bool = True
    on_signal: bool = True


@dataclass(frozen=True)
class JobSettings:
    """All settings of a strategy; arguments of ``MegatronStrategy`` explain those without a word here.

    Attributes:
        layout: number of ranks of each kind of parallelism; the number of data-parallel ranks is still open.
        split: share of each pipeline stage in the layers.
        recompute: activations that are computed again.
        optimizer: switches of the distributed optimizer; dtypes are set when training begins.
        saving: settings of checkpoints.
        arguments: arguments of the constructor, as given.
        pipeline_schedule: name of the pipeline schedule.
        micro_batch_size: samples of one forward.
        grad_reduce_dtype: dtype in which gradients are summed over ranks; ``None`` for Intel's rule on Gaudi.
        broadcast_predictions: True if all stages get the output of ``predict_step``.
        compile: True or a backend, for compiled blocks.
        gpu_migration: True if modules written for CUDA run on Gaudi.
        ops: implementation asked for, by op.
        fp8: recipe of fp8 layers.
        check_for_nan: True if NaN and infinity end the run.
        record_actions: True if each rank keeps a record of its actions.
        process_group_backend: backend of collectives.
        timeout: limit for a collective; ``None`` for the device's default.
        may_differ: names of facts that ranks may be given differently.
        max_memory: memory for the tensors of a rank, as given.
    """

    layout: ParallelLayout
    split: LayerSplit
    recompute: RecomputePlan
    optimizer: DistributedOptimizerConfig = field(default_factory=DistributedOptimizerConfig)
    saving: SavingSettings = SavingSettings()
    arguments: Mapping[str, Any] | None = None
    pipeline_schedule: PipelineSchedule | None = None
    micro_batch_size: int | None = None
    grad_reduce_dtype: GradReduceDtype | None = None
    broadcast_predictions: bool = True
    compile: bool | str = False
    gpu_migration: bool = False
    ops: dict[str, str] | str | None = None
    fp8: Fp8Recipe = field(default_factory=Fp8Recipe)
    check_for_nan: bool = True
    record_actions: bool = True
    process_group_backend: str | None = None
    timeout: timedelta | None = None
    may_differ: tuple[str, ...] = ()
    max_memory: int | str | None = None
