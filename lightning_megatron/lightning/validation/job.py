"""Everything that can be known to be wrong before a process is started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Protocol, runtime_checkable

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_megatron import device as devices
from lightning_megatron.arguments import Check, Rules, above, at_least
from lightning_megatron.checkpoint.directory.newest import is_checkpoint
from lightning_megatron.checkpoint.formats.hf.directory import is_hf_directory
from lightning_megatron.config.layout import (
    BATCH_RULES,
    BatchShape,
    HasBatchShape,
    HasModelShape,
    ModelShape,
    ParallelLayout,
)
from lightning_megatron.config.moe import MoEConfig
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import Problem, problems_of
from lightning_megatron.lightning.pretrained.config_check import checkpoint_problems
from lightning_megatron.lightning.pretrained.hugging_face import hf_problems
from lightning_megatron.lightning.strategy.settings import JobSettings
from lightning_megatron.lightning.validation.features import (
    callback_problems,
    checkpoint_io_problem,
    module_problems,
    trainer_problems,
)
from lightning_megatron.lightning.validation.saving import saving_problems
from lightning_megatron.moe.capacity_bins import bins_problems
from lightning_megatron.ops.registry import Ops, parse_op_modes
from lightning_megatron.optim.update_scope import elementwise_problems
from lightning_megatron.pipeline.partition import parse_layout
from lightning_megatron.recompute import granularity_problems

RULES: Rules = {
    "recompute": Check(granularity_problems),
    "ops": Check(lambda asked: parse_op_modes(asked)[1]),
    "fp8": Check(lambda recipe: [] if recipe is None else recipe.problems()),
    "checkpoint_io": Check(lambda plugin: [] if plugin is None else [checkpoint_io_problem("checkpoint_io", plugin)]),
    "elementwise_optimizers": Check(lambda given: elementwise_problems(given or ())),
    "pipeline_layout": Check(lambda text: [] if text is None else problems_of(parse_layout, text)),
    **dict.fromkeys(("tp", "pp", "cp", "ep", "etp", "vpp", "recompute_num_layers"), at_least(1)),
    **BATCH_RULES,
    "bucket_size": at_least(1),
    **dict.fromkeys(("first_stage_layers", "last_stage_layers"), at_least(0)),
    "timeout": above(timedelta(0), timedelta(minutes=10)),
}
"""Rules for single arguments of the strategy, beside their types."""

ELSEWHERE = {
    **dict.fromkeys(("tensor_parallel_size", "tensor_model_parallel_size", "tp_size"), "tp"),
    **dict.fromkeys(("pipeline_parallel_size", "pipeline_model_parallel_size", "pp_size"), "pp"),
    **dict.fromkeys(("context_parallel_size", "cp_size"), "cp"),
    **dict.fromkeys(("expert_parallel_size", "expert_model_parallel_size", "ep_size"), "ep"),
    "expert_tensor_parallel_size": "etp",
    **dict.fromkeys(("virtual_pipeline_model_parallel_size", "virtual_pipeline_parallel_size"), "vpp"),
    **dict.fromkeys(("dp", "dp_size", "data_parallel_size"), "it is what tp, pp and cp leave of devices x num_nodes"),
    "global_batch_size": "it is batch_size (of the data) x dp x accumulate_grad_batches (of the Trainer)",
    **dict.fromkeys(("use_distributed_optimizer", "use_dist_optimizer"), "distributed_optimizer"),
    **dict.fromkeys(("recompute_granularity", "activation_checkpointing"), "recompute"),
    **dict.fromkeys(("cp_communication_type", "context_parallel_comm_type"), "cp_comm_type"),
    **dict.fromkeys(("backend", "distributed_backend"), "process_group_backend"),
}
"""Our arguments, or what to do instead, by the names of Megatron, NeMo and DeepSpeed."""


@runtime_checkable
class ChecksData(Protocol):
    """An object for the Trainer that can check its files before a process is started: a data module."""

    def data_problems(self) -> list[Problem]:
        """Every fault of the files that its arguments name."""
        ...


def backend_problems(backend: str | None, device: torch.device) -> list[Problem]:
    """A backend of collectives that does not exist here, or not for the devices of this job."""
    known = devices.collective_backends(device)
    by_device = dict(part.split(":", 1) for part in (backend or "").split(",") if ":" in part)  # "cpu:a,other:b"
    if backend is None or by_device.get(device.type, backend) in known:
        return []
    reason = f"no backend that is here for tensors on {device.type}"
    return [Problem("process_group_backend", backend, reason, (*known, None))]


@dataclass(frozen=True)
class Job:
    """Everything that is known of a job before its processes start.

    Attributes:
        settings: settings of the strategy.
        layout: layout for the job's number of ranks.
        ops: implementations of ops, on the job's devices.
        dtype: dtype of parameters.
        objects: objects handed to the Trainer: module, loaders, data module, path of a checkpoint.
        trainer: the Trainer, if there is one.
    """

    settings: JobSettings
    layout: ParallelLayout
    ops: Ops
    dtype: torch.dtype
    objects: Sequence[object]
    trainer: Trainer | None = None

    @property
    def modules(self) -> list[LightningModule]:
        """Modules among the objects."""
        return [item for item in self.objects if isinstance(item, LightningModule)]

    @property
    def model(self) -> ModelShape | None:
        """Shape of the model, if a module says it."""
        return next((item.model_shape for item in self.objects if isinstance(item, HasModelShape)), None)

    @property
    def batch(self) -> BatchShape:
        """Shape of batches, as far as it is known: a plain DataLoader says only its batch size."""
        batch = next((item.batch_shape for item in self.objects if isinstance(item, HasBatchShape)), None)
        if batch is None:
            sizes = (getattr(item, "batch_size", None) for item in self.objects)
            batch = BatchShape(next((size for size in sizes if isinstance(size, int)), None))
        return replace(batch, micro_batch_size=self.settings.micro_batch_size)


def job_problems(job: Job) -> list[Problem]:
    """Every fault of a job that can be known before its processes start, one function a subject."""
    subjects = (
        trainer_faults,
        saving_faults,
        module_faults,
        data_faults,
        layout_faults,
        precision_faults,
        expert_faults,
        weight_faults,
        op_faults,
        recompute_faults,
    )
    return [problem for subject in subjects for problem in subject(job)]


def trainer_faults(job: Job) -> list[Problem]:
    """Callbacks and arguments of the Trainer."""
    if job.trainer is None:
        return []
    callbacks: Sequence[Callback] = job.trainer.callbacks  # type: ignore[attr-defined]
    return callback_problems(callbacks, job.layout, job.modules) + trainer_problems(job.trainer)


def saving_faults(job: Job) -> list[Problem]:
    """Faults of the first save."""
    return saving_problems(job.objects, job.trainer)


def module_faults(job: Job) -> list[Problem]:
    """Features of modules that the layout does not support."""
    return [problem for module in job.modules for problem in module_problems(module, job.layout, job.trainer)]


def data_faults(job: Job) -> list[Problem]:
    """Faults of the files that data modules read."""
    return [problem for data in job.objects if isinstance(data, ChecksData) for problem in data.data_problems()]


def layout_faults(job: Job) -> list[Problem]:
    """Sizes of the model and the batch that the layout cannot split."""
    model, split = job.model, job.settings.split
    # With an uneven split, the split itself checks the number of layers.
    by_split = () if split.is_even else ("pp", "vpp", "pp x vpp")
    found = [p for p in job.layout.problems(model=model, batch=job.batch) if p.argument not in by_split]
    if model is not None and not split.is_even:
        found += split.problems(model.num_layers, job.layout.pp, job.layout.vpp)
    return found


def precision_faults(job: Job) -> list[Problem]:
    """Precisions in which this package's models do not compute."""
    if job.model is None or job.dtype != torch.float64:
        return []
    reason = "this package's norms, attention and losses compute in fp32: '64-true' is for modules of your own"
    return [Problem("precision", "64-true", reason, ("32-true",))]


def expert_faults(job: Job) -> list[Problem]:
    """Batches and dtypes that experts cannot compute with."""
    model, batch, layout = job.model, job.batch, job.layout
    if not isinstance(model, MoEConfig) or not model.num_experts:
        return []
    found = []
    if model.moe_dynamic and job.dtype == torch.float16:
        reason = "moe_dynamic computes in bf16 or fp32"
        found.append(Problem("precision", "16-mixed", reason, ("bf16-mixed", "32-true")))
    samples = batch.micro_batch_size or batch.batch_size
    if model.moe_capacity_bins and batch.seq_length and samples:
        tokens = batch.seq_length * samples // (layout.tp * layout.cp)
        found += bins_problems(model, tokens)
    return found


def weight_faults(job: Job) -> list[Problem]:
    """Weights of another shape than the model's, in a Hugging Face directory or a checkpoint."""
    model = job.model
    if not isinstance(model, TransformerConfig):
        return []
    paths = [item for item in job.objects if isinstance(item, str | os.PathLike)]
    found = [problem for path in paths if is_hf_directory(path) for problem in hf_problems(path, model)]
    return found + [problem for path in paths if is_checkpoint(path) for problem in checkpoint_problems(path, model)]


def op_faults(job: Job) -> list[Problem]:
    """Implementations of ops that the model cannot use."""
    return [] if job.model is None else job.ops.model_problems(job.layout, job.model)


def recompute_faults(job: Job) -> list[Problem]:
    """Settings of recomputation that the model cannot use."""
    return job.settings.recompute.problems(job.layout, job.model)
