"""Everything that can be known to be wrong before a process is started."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_megatron import device as devices
from lightning_megatron.arguments import Check, Rules, above, at_least
from lightning_megatron.checkpoint.select.newest import candidates, newest_good
from lightning_megatron.config.layout import (
    BATCH_RULES,
    BatchShape,
    HasBatchShape,
    HasModelShape,
    ModelShape,
    ParallelLayout,
)
from lightning_megatron.config.moe import MoEConfig
from lightning_megatron.config.recompute_plan import granularity_problems
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.documents import device_problem
from lightning_megatron.errors import CheckpointError, ConfigError, Problem, problems_of
from lightning_megatron.extensions import extension
from lightning_megatron.layers.parts import part_problems
from lightning_megatron.lightning import pretrained
from lightning_megatron.lightning.pretrained.trained_tokenizer import TrainedTokenizer
from lightning_megatron.lightning.validation.features import (
    callback_problems,
    checkpoint_io_problem,
    module_problems,
    trainer_problems,
)
from lightning_megatron.lightning.validation.memory import UNKNOWN, MemoryForecast, MemoryLimit
from lightning_megatron.lightning.validation.samples import sample_problems
from lightning_megatron.lightning.validation.saving import saving_problems
from lightning_megatron.lightning.validation.settings import JobSettings
from lightning_megatron.machine.byte_size import memory_problems
from lightning_megatron.moe.capacity_bins import bins_problems
from lightning_megatron.ops.registry import Ops, parse_op_modes
from lightning_megatron.optim.core.update_scope import elementwise_problems
from lightning_megatron.pipeline.partition import BALANCED, parse_layout

RULES: Rules = {
    "recompute": Check(granularity_problems),
    "ops": Check(lambda asked: parse_op_modes(asked)[1]),
    "fp8": Check(lambda recipe: [] if recipe is None else recipe.problems()),
    "checkpoint_io": Check(lambda plugin: [] if plugin is None else [checkpoint_io_problem("checkpoint_io", plugin)]),
    "elementwise_optimizers": Check(lambda given: elementwise_problems(given or ())),
    "pipeline_layout": Check(lambda text: [] if text in (None, BALANCED) else problems_of(parse_layout, text)),
    **dict.fromkeys(("tp", "pp", "cp", "ep", "etp", "vpp", "recompute_num_layers"), at_least(1)),
    **BATCH_RULES,
    "bucket_size": at_least(1),
    **dict.fromkeys(("first_stage_layers", "last_stage_layers"), at_least(0)),
    "timeout": above(timedelta(0), timedelta(minutes=10)),
    "max_memory": Check(partial(memory_problems, "max_memory")),
}
"""Rules for single arguments of the strategy, beside their types."""

ELSEWHERE = {
    **dict.fromkeys(("tensor_parallel", "tensor_parallel_size", "tensor_model_parallel_size", "tp_size"), "tp"),
    **dict.fromkeys(("pipeline_parallel", "pipeline_parallel_size", "pipeline_model_parallel_size", "pp_size"), "pp"),
    **dict.fromkeys(("context_parallel", "context_parallel_size", "cp_size"), "cp"),
    **dict.fromkeys(("expert_parallel", "expert_parallel_size", "expert_model_parallel_size", "ep_size"), "ep"),
    "expert_tensor_parallel_size": "etp",
    **dict.fromkeys(("virtual_pipeline_model_parallel_size", "virtual_pipeline_parallel_size"), "vpp"),
    **dict.fromkeys(("dp", "dp_size", "data_parallel_size"), "it is what tp, pp and cp leave of devices x num_nodes"),
    "global_batch_size": "it is batch_size (of the data) x dp x accumulate_grad_batches (of the Trainer)",
    "rampup_batch_size": "it is an argument of MegatronDataModule",
    **dict.fromkeys(("use_distributed_optimizer", "use_dist_optimizer"), "distributed_optimizer"),
    **dict.fromkeys(("recompute_granularity", "activation_checkpointing"), "recompute"),
    **dict.fromkeys(("cp_communication_type", "context_parallel_comm_type"), "cp_comm_type"),
    **dict.fromkeys(("backend", "distributed_backend"), "process_group_backend"),
    **dict.fromkeys(
        ("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "start_method"),
        "leave it out: parameters that a step does not use are found, and gradients always lie in buckets",
    ),
    **dict.fromkeys(
        ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper"), "grad_reduce_dtype is the dtype in which ranks sum"
    ),
    "bucket_cap_mb": "bucket_size, in elements",
    **dict.fromkeys(("zero_optimization", "stage", "sharding_strategy"), "distributed_optimizer, which is ZeRO 1"),
    **dict.fromkeys(("cpu_offload", "offload_optimizer", "offload_parameters"), "not there: tp, pp and recompute save"),
}
"""Arguments of the strategy, or advice, by the names that Megatron, NeMo, DeepSpeed, DDP and lightning-habana use."""


@runtime_checkable
class ChecksData(Protocol):
    """An object for the Trainer that can check its files before a process is started: a data module."""

    def data_problems(self) -> list[Problem]:
        """Every fault of the files that its arguments name."""
        ...


@runtime_checkable
class PacksDocuments(Protocol):
    """A data module that knows whether its samples hold several documents."""

    @property
    def packs_documents(self) -> bool:
        """True if batches say where documents begin."""
        ...


def document_problems(objects: Iterable[object], device: torch.device) -> list[Problem]:
    """Data whose documents a device cannot keep apart."""
    packed = [item for item in objects if isinstance(item, PacksDocuments) and item.packs_documents]
    problem = device_problem("segment_ids", device)
    return [] if problem is None else [replace(problem, argument="data", value=type(item).__name__) for item in packed]


def backend_problems(backend: str | None, device: torch.device) -> list[Problem]:
    """A backend of collectives that does not exist here, or not for the devices of this job."""
    known = devices.collective_backends(device)
    by_device = dict(part.split(":", 1) for part in (backend or "").split(",") if ":" in part)  # "cpu:a,other:b"
    if backend is None or by_device.get(device.type, backend) in known:
        return []
    reason = f"no backend that is available here for tensors on {device.type}"
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
        memory_limit: memory of a device.
    """

    settings: JobSettings
    layout: ParallelLayout
    ops: Ops
    dtype: torch.dtype
    objects: Sequence[object]
    trainer: Trainer | None = None
    memory_limit: MemoryLimit = UNKNOWN

    @property
    def modules(self) -> list[LightningModule]:
        """Modules among the objects."""
        return [item for item in self.objects if isinstance(item, LightningModule)]

    @property
    def model(self) -> ModelShape | None:
        """Shape of the model, if a module declares it."""
        return next((item.model_shape for item in self.objects if isinstance(item, HasModelShape)), None)

    @property
    def batch(self) -> BatchShape:
        """Shape of batches, as far as it is known: a plain DataLoader says only its batch size."""
        batch = next((item.batch_shape for item in self.objects if isinstance(item, HasBatchShape)), None)
        if batch is None:
            sizes = (getattr(item, "batch_size", None) for item in self.objects)
            batch = BatchShape(next((size for size in sizes if isinstance(size, int)), None))
        whole, dp = batch.global_batch_size, self.layout.dp  # None if the sizes do not multiply to the world size
        if batch.batch_size is None and whole is not None and dp is not None and whole % dp == 0:
            batch = replace(batch, batch_size=whole // dp)
        return replace(batch, micro_batch_size=self.settings.micro_batch_size)

    @cached_property
    def forecast(self) -> MemoryForecast:
        """Forecast of the job's memory."""
        found: MemoryForecast = extension("memory forecast")(self)
        return found


def job_problems(job: Job) -> list[Problem]:
    """Every fault of a job that can be known before its processes start, one function a subject."""
    subjects = (
        trainer_faults,
        module_faults,
        data_faults,
        tokenizer_faults,
        sample_faults,
        layout_faults,
        precision_faults,
        expert_faults,
        weight_faults,
        op_faults,
    )
    found = [problem for subject in subjects for problem in subject(job)]
    return found or memory_faults(job)


def trainer_faults(job: Job) -> list[Problem]:
    """Callbacks and arguments of the Trainer, and faults of the first save."""
    found = []
    if job.trainer is not None:
        callbacks: Sequence[Callback] = job.trainer.callbacks  # type: ignore[attr-defined]
        found = callback_problems(callbacks, job.layout, job.settings.micro_batch_size, job.modules)
        found += trainer_problems(job.trainer)
    return found + saving_problems(job.objects, job.trainer, one_file=not job.settings.save_distributed_checkpoint)


def module_faults(job: Job) -> list[Problem]:
    """Features of modules that the layout does not support."""
    return [problem for module in job.modules for problem in module_problems(module, job.layout, job.trainer)]


def data_faults(job: Job) -> list[Problem]:
    """Faults of the files that data modules read."""
    return [problem for data in job.objects if isinstance(data, ChecksData) for problem in data.data_problems()]


def tokenizer_faults(job: Job) -> list[Problem]:
    """Data made with another tokenizer than the weights that a run starts with."""
    specs = [spec for item in job.objects if (spec := getattr(item, "required_tokenizer", None)) is not None]
    if not specs:
        return []
    known = [TrainedTokenizer.of_settings(getattr(module, "hf_settings", {})) for module in job.modules]
    paths = [item for item in job.objects if isinstance(item, str | os.PathLike)]
    if "last" in paths and job.trainer is not None:
        paths += _last_checkpoint(job.trainer)
    for path in paths:
        with suppress(CheckpointError, ConfigError):  # reported when the path is loaded
            known.append(replace(TrainedTokenizer.of_weights(path), vocab_size=None))  # layout_faults checks sizes
    do = "or give allow_other_data=True"
    return [p for spec in specs for one in known for p in one.problems("tokenizer_model", spec, do)]


def _last_checkpoint(trainer: Trainer) -> list[Path]:
    """The newest checkpoint, if there is one; folders that loggers choose are known only after the launch."""
    folders = (getattr(saver, "dirpath", None) for saver in trainer.checkpoint_callbacks)
    entries = (entry for folder in folders if folder is not None for entry in Path(folder).rglob("*.ckpt"))
    newest, _ = newest_good(candidates((), entries))
    return [] if newest is None else [newest.path]


def sample_faults(job: Job) -> list[Problem]:
    """Global batches and lengths of training, where samples are counted."""
    return sample_problems(job.objects, job.layout, job.settings.micro_batch_size, job.trainer)


def layout_faults(job: Job) -> list[Problem]:
    """Sizes of the model and the batch that the layout cannot split."""
    model, split = job.model, job.settings.split
    # With an uneven split, the split itself checks the number of layers.
    by_split = () if split.is_even else ("pp", "vpp", "pp x vpp")
    found = [p for p in job.layout.problems(model=model, batch=job.batch) if p.argument not in by_split]
    if model is not None and not split.is_even:
        found += split.problems(model.num_layers, job.layout.pp, job.layout.vpp)
    if isinstance(model, TransformerConfig):
        found += model.layout_problems(job.layout) + part_problems(model, job.layout)
    return found


def precision_faults(job: Job) -> list[Problem]:
    """Precisions in which this package's models do not compute, or gradients are not accumulated."""
    found, grads = [], job.settings.main_grads_dtype
    if job.model is not None and job.dtype == torch.float64:
        reason = "this package's norms, attention and losses compute in fp32: '64-true' is for modules of your own"
        found.append(Problem("precision", "64-true", reason, ("32-true",)))
    if grads in ("bf16", "auto") and job.dtype != torch.bfloat16:
        reason = f"gradients of {str(job.dtype).removeprefix('torch.')} parameters are not accumulated in bf16"
        found.append(Problem("main_grads_dtype", grads, reason, (None,)))
    return found


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
    return [problem for path in paths for problem in pretrained.weight_problems(path, model)]


def op_faults(job: Job) -> list[Problem]:
    """Implementations of ops, and settings of their recomputation, that the model cannot use."""
    found = [] if job.model is None else job.ops.model_problems(job.layout, job.model, job.dtype)
    return found + job.settings.recompute.problems(job.layout, job.model)


def memory_faults(job: Job) -> list[Problem]:
    """A layout that cannot fit; only of a job without other faults."""
    return job.forecast.problems()
