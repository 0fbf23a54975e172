"""Everything that can be known to be wrong before a process is started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import CheckpointIO

from lightning_megatron.checkpoint.hf.directory import is_hf_directory
from lightning_megatron.checkpoint.locate import is_checkpoint
from lightning_megatron.config import (
    BatchShape,
    HasBatchShape,
    HasModelShape,
    ParallelLayout,
    Problem,
    nearest_names,
)
from lightning_megatron.lightning.grad_reduction import REDUCE_DTYPES
from lightning_megatron.lightning.hugging_face import hf_problems
from lightning_megatron.lightning.refusals import callback_problems, checkpoint_io_problem, module_problems
from lightning_megatron.lightning.saved_shape import path_problems
from lightning_megatron.lightning.saving_checks import saving_problems
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.moe.capacity_bins import bins_problems
from lightning_megatron.moe.config import MoEConfig
from lightning_megatron.ops.choice import Ops
from lightning_megatron.pipeline.partition import LayerSplit
from lightning_megatron.recompute import RecomputePlan


def argument_problems(
    micro_batch_size: int | None,
    bucket_size: int | None,
    grad_reduce_dtype: str | None,
    checkpoint_io: CheckpointIO | None,
) -> list[Problem]:
    """Faults of the strategy's own arguments."""
    found: list[Problem] = []
    if micro_batch_size is not None and micro_batch_size < 1:
        found.append(Problem("micro_batch_size", micro_batch_size, "holds at least one sample", (1, None)))
    if bucket_size is not None and bucket_size < 1:
        found.append(Problem("bucket_size", bucket_size, "holds at least one element", (1, None)))
    if grad_reduce_dtype not in (None, *REDUCE_DTYPES):
        near = nearest_names(str(grad_reduce_dtype), list(REDUCE_DTYPES))
        found.append(Problem("grad_reduce_dtype", grad_reduce_dtype, "unknown", near))
    if checkpoint_io is not None:
        found.append(checkpoint_io_problem("checkpoint_io", checkpoint_io))
    return found


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
    found = [] if trainer is None else callback_problems(trainer.callbacks, layout, modules)  # type: ignore[attr-defined]
    found += saving_problems(objects, trainer)
    for module in modules:
        found += module_problems(module, layout, trainer)
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
