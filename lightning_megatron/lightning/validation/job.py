"""Everything that can be known to be wrong before a process is started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Protocol, runtime_checkable

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_megatron import device as devices
from lightning_megatron.arguments import Check, Rules, above, at_least
from lightning_megatron.checkpoint.directory.newest import is_checkpoint
from lightning_megatron.checkpoint.formats.hf.directory import is_hf_directory
from lightning_megatron.config.layout import BATCH_RULES, BatchShape, HasBatchShape, HasModelShape, ParallelLayout
from lightning_megatron.config.moe import MoEConfig
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import Problem, problems_of
from lightning_megatron.lightning.pretrained.hugging_face import hf_problems
from lightning_megatron.lightning.pretrained.saved_shape import path_problems
from lightning_megatron.lightning.validation.features import (
    callback_problems,
    checkpoint_io_problem,
    module_problems,
    trainer_problems,
)
from lightning_megatron.lightning.validation.saving import saving_problems
from lightning_megatron.moe.capacity_bins import bins_problems
from lightning_megatron.ops.registry import Ops, parse_op_modes
from lightning_megatron.optim.reach import vouching_problems
from lightning_megatron.pipeline.partition import LayerSplit, parse_layout
from lightning_megatron.recompute import RecomputePlan, granularity_problems

RULES: Rules = {
    "recompute": Check(granularity_problems),
    "ops": Check(lambda asked: parse_op_modes(asked)[1]),
    "fp8": Check(lambda recipe: [] if recipe is None else recipe.problems()),
    "checkpoint_io": Check(lambda plugin: [] if plugin is None else [checkpoint_io_problem("checkpoint_io", plugin)]),
    "elementwise_optimizers": Check(lambda vouched: vouching_problems(vouched or ())),
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
    """Something handed to the Trainer that can look at its files before a process is started: a data module."""

    def data_problems(self) -> list[Problem]:
        """Every fault of the files that its arguments name."""
        ...


def backend_problems(backend: str | None, device: torch.device) -> list[Problem]:
    """A backend of collectives that there is not, or not for the devices of this job."""
    known = devices.collective_backends(device)
    by_device = dict(part.split(":", 1) for part in (backend or "").split(",") if ":" in part)  # "cpu:a,other:b"
    if backend is None or by_device.get(device.type, backend) in known:
        return []
    reason = f"no backend that is here for tensors on {device.type}"
    return [Problem("process_group_backend", backend, reason, (*known, None))]


def job_problems(
    objects: Sequence[object],
    trainer: Trainer | None,
    layout: ParallelLayout,
    split: LayerSplit,
    recompute: RecomputePlan,
    ops: Ops,
    micro_batch_size: int | None,
    dtype: torch.dtype,
) -> list[Problem]:
    """Faults of what the user hands to the Trainer, under a layout.

    Args:
        objects: module, loaders, data module, path of a checkpoint.
        trainer: whose callbacks are looked at.
        layout: for the job's number of ranks.
        split: how layers are shared out over stages.
        recompute: what is computed again.
        ops: what arithmetic is chosen from.
        micro_batch_size: samples of one forward.
        dtype: of the parameters.
    """
    model = next((item.model_shape for item in objects if isinstance(item, HasModelShape)), None)
    batch = next((item.batch_shape for item in objects if isinstance(item, HasBatchShape)), None)
    if batch is None:  # a plain DataLoader says only its batch size
        sizes = (getattr(item, "batch_size", None) for item in objects)
        batch = BatchShape(next((size for size in sizes if isinstance(size, int)), None))
    batch = replace(batch, micro_batch_size=micro_batch_size)
    modules = [item for item in objects if isinstance(item, LightningModule)]
    found = []
    if trainer is not None:
        found += callback_problems(trainer.callbacks, layout, modules) + trainer_problems(trainer)  # type: ignore[attr-defined]
    found += saving_problems(objects, trainer)
    for module in modules:
        found += module_problems(module, layout, trainer)
    for data in (item for item in objects if isinstance(item, ChecksData)):
        found += data.data_problems()
    # Whether layers can be shared out is the split's to say where the user wants it uneven.
    shared_out = ("pp", "vpp", "pp x vpp")
    found += [p for p in layout.problems(model=model, batch=batch) if split.is_even or p.argument not in shared_out]
    if model is not None and not split.is_even:
        found += split.problems(model.num_layers, layout.pp, layout.vpp)
    if model is not None and dtype == torch.float64:
        reason = "this package's norms, attention and losses compute in fp32: '64-true' is for modules of your own"
        found.append(Problem("precision", "64-true", reason, ("32-true",)))
    if isinstance(model, MoEConfig) and model.num_experts:
        found += expert_problems(model, layout, batch, dtype)
    if isinstance(model, TransformerConfig):
        paths = [item for item in objects if isinstance(item, str | os.PathLike)]
        found += [problem for path in paths if is_hf_directory(path) for problem in hf_problems(path, model)]
        found += [problem for path in paths if is_checkpoint(path) for problem in path_problems(path, model)]
    if model is not None:
        found += ops.model_problems(layout, model)
    return found + recompute.problems(layout, model)


def expert_problems(model: MoEConfig, layout: ParallelLayout, batch: BatchShape, dtype: torch.dtype) -> list[Problem]:
    """What experts cannot do with these batches and this dtype."""
    found = []
    if model.moe_dynamic and dtype == torch.float16:
        reason = "moe_dynamic computes in bf16 or fp32"
        found.append(Problem("precision", "16-mixed", reason, ("bf16-mixed", "32-true")))
    samples = batch.micro_batch_size or batch.batch_size
    if model.moe_capacity_bins and batch.seq_length and samples:
        tokens = batch.seq_length * samples // (layout.tp * layout.cp)
        found += bins_problems(model, tokens)
    return found
