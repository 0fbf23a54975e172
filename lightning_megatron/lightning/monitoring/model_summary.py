"""Size of a model of which each rank holds a part: the first line of a run's output."""

from __future__ import annotations

from math import prod

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelSummary, RichModelSummary, ThroughputMonitor
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.model_summary.model_summary import get_human_readable_count
from torch import nn

from lightning_megatron.comm.objects import all_gather_object
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.lightning.compat._private import summary_depth, training_data
from lightning_megatron.lightning.step.grad_reduction import loader_batch_size
from lightning_megatron.lightning.validation.last_stage import warn_of_last_stage
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.params import named_specs


def count_parameters(module: nn.Module, mesh: ParallelMesh) -> tuple[int, int, int]:
    """Elements of a whole model's parameters, of its trained ones, and, with padding, of the rank that holds most.

    All ranks call this.
    """
    whole = ((name, param, spec) for name, param, spec in named_specs(module) if spec.tied_with in (None, name))
    sizes = {name: (prod(spec.global_shape), param.requires_grad) for name, param, spec in whole}
    held = sum(param.numel() for param in module.parameters())
    if mesh.pp.size > 1:  # the stages of one pipeline make up one model
        is_source = mesh.tp.rank == mesh.dp_cp.rank == 0
        stages = all_gather_object(mesh, (sizes, held) if is_source else ({}, 0))
        sizes = {name: size for stage, _ in stages for name, size in stage.items()}
        held = max(held for _, held in stages)
    return sum(size for size, _ in sizes.values()), sum(size for size, trains in sizes.values() if trains), held


def introduce(trainer: Trainer, module: LightningModule, mesh: ParallelMesh) -> None:
    """Print the size of the whole model, in place of Lightning's default summary, which would show a rank's part.

    Warnings of what works otherwise on several ranks follow. All ranks call this.
    """
    counts, layout = count_parameters(module, mesh), mesh.layout
    fits = trainer.state.fn == TrainerFn.FITTING
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if mesh.is_distributed or not fits:
        batch_size = loader_batch_size(training_data(trainer)) if fits else None
        line = start_line(layout, counts, batch_size, trainer.accumulate_grad_batches)
        rank_zero_info(f"{type(trainer.strategy).__name__}: {line}")
    if mesh.is_distributed:
        callbacks[:] = [callback for callback in callbacks if not _is_default_summary(callback)]
    if layout.model_parallel_size > 1 and any(isinstance(callback, ThroughputMonitor) for callback in callbacks):
        rank_zero_warn(
            f"ThroughputMonitor counts the samples of each rank, and {layout.model_parallel_size} ranks read the same:"
            " take lightning_megatron.Throughput, or divide by that"
        )
    warn_of_last_stage(module, layout.pp)


def start_line(layout: ParallelLayout, counts: tuple[int, int, int], batch_size: int | None, accumulated: int) -> str:
    """Describe the layout of a run, the size of its model and its global batch in one line.

    Args:
        layout: layout of all ranks.
        counts: numbers of :func:`count_parameters`.
        batch_size: samples of one batch of a replica's loader; ``None`` if unknown.
        accumulated: batches of one optimizer step.
    """
    total, trained, held = (get_human_readable_count(count).strip() for count in counts)
    parts = [
        f"{layout_text(layout)}, {total} parameters{f' ({trained} trained)' * (counts[0] != counts[1])}",
        f"{'up to ' if layout.pp > 1 else ''}{held} a rank",
    ]
    if batch_size is not None:
        factors = batch_size, layout.data_parallel_size, accumulated
        text = " x ".join(map(str, factors))
        parts.append(f"global batch {prod(factors)} = {text} (batch, dp, accumulated)")
    return ", ".join(parts)


def layout_text(layout: ParallelLayout) -> str:
    """Describe a resolved layout: ``tp 2 x pp 2 x dp 4, ep 2, sequence parallel``."""
    axes = [f"{name} {size}" for name in ("tp", "pp", "cp") if (size := getattr(layout, name)) > 1]
    notes = [" x ".join([*axes, f"dp {layout.data_parallel_size}"])]
    notes += [f"{name} {size}" for name in ("ep", "vpp") if (size := getattr(layout, name)) > 1]
    if layout.etp not in (None, layout.tp):
        notes.append(f"etp {layout.etp}")
    return ", ".join([*notes, "sequence parallel"] if layout.uses_sequence_parallel else notes)


def _is_default_summary(callback: Callback) -> bool:
    stock = ModelSummary, RichModelSummary
    return isinstance(callback, stock) and type(callback) in stock and summary_depth(callback) == 1
