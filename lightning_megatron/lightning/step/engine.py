"""Execution of a user's step methods over micro-batches and pipeline stages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.apply_func import apply_to_collection

from lightning_megatron.comm.objects import broadcast_object
from lightning_megatron.device import is_lazy, mark_step
from lightning_megatron.lightning.step.grad_reduction import declared_batch_size
from lightning_megatron.lightning.step.log_capture import LogSync
from lightning_megatron.lightning.step.metric_sync import MetricSync, MetricWatch
from lightning_megatron.lightning.step.micro_batches import split_batch
from lightning_megatron.lightning.step.optimizers import OptimizerSet
from lightning_megatron.lightning.step.per_token_loss import num_tokens_in, scale_with_tokens
from lightning_megatron.lightning.step.stage_work import EvaluationWork, MicroBatches, TrainingWork
from lightning_megatron.lightning.step.watchers import reads_outputs
from lightning_megatron.lightning.streams.generators import kept_generators
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.pipeline.runtime import PipelineRuntime, evaluation_plan, training_plan
from lightning_megatron.pipeline.schedule import schedule_kind
from lightning_megatron.recorder.file_format import Kind
from lightning_megatron.stage import BackwardScale, StageBoundary


class StepEngine:
    """Runs a user's step methods, over micro-batches and pipeline stages where there are several.

    Attributes:
        device: device of the model.

    Args:
        boundary: boundary of pipeline stages; ``None`` without a pipeline.
        schedule: name of the pipeline schedule.
        micro_batch_size: samples of one forward; ``None`` for the whole batch.
        device: device of the model and its activations.
        dtype: dtype of activations between stages.
        context: function that returns a context manager for each forward of ``training_step``.
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        boundary: StageBoundary | None,
        schedule: str | None,
        micro_batch_size: int | None,
        device: torch.device,
        dtype: torch.dtype,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._context, self._is_lazy = context, is_lazy(device)
        self._mesh, self.device, self._schedule, self._size = mesh, device, schedule, micro_batch_size
        self._is_pipeline, self._shares_outputs = boundary is not None, False
        self._boundary = boundary or StageBoundary(1)  # without a pipeline, only its loss scale is used
        self._boundary.begin = mesh.rng.begin_stage  # every stage has drawn alike before the model's call
        self._logs = LogSync(mesh, device)
        self._metrics = MetricSync(mesh, device)
        self._runtime = PipelineRuntime(mesh.pp, self._boundary.num_stages, device, dtype, mesh.weight_grads)
        mesh.weight_grads.enabled = self._is_pipeline and schedule_kind(schedule, 1).splits_backward

    @property
    def backward_scale(self) -> BackwardScale:
        """Factor of the loss of the micro-batch whose forward is running."""
        return self._boundary.loss_scale

    def plain_step(self, module: LightningModule, step: Callable[[], Any], scale: float) -> Any:
        """Run one forward of a model without stages; the caller runs the backward, of ``scale`` times the loss."""
        with self._mesh.pp.during(Kind.FORWARD), self._boundary.at(0, None, scale) as backward_scale:
            with self._context():
                output = step()
            if (tokens := num_tokens_in(output, module)) is not None:
                scale_with_tokens(backward_scale, tokens)
            self.mark_step()
            return output

    def mark_step(self) -> None:
        """Run the ops that a lazy device has collected."""
        if self._is_lazy:
            mark_step(self.device)

    def watch(self, module: LightningModule) -> None:
        """Synchronize the torchmetrics objects of a module over ranks, and look if a hook reads outputs of a step."""
        self._metrics.install(module)
        self._shares_outputs = self._is_pipeline and reads_outputs(module.trainer)

    def metric_watch(self) -> MetricWatch:
        """A callback that lets metrics made during the run be synchronized, too."""
        return MetricWatch(self._metrics)

    def split(self, batch: Any, trainer: Trainer, loader: int = 0) -> MicroBatches | None:
        """Micro-batches of a batch; ``None`` if one plain call of the step is enough.

        Args:
            batch: the batch.
            trainer: its loaders say how many samples a batch has.
            loader: index of an evaluation's loader.
        """
        if self._size is None and not self._is_pipeline:
            return None
        micro_batches = split_batch(batch, self._size, declared_batch_size(trainer, loader))
        return None if len(micro_batches) == 1 and not self._is_pipeline else micro_batches

    def train(
        self,
        module: LightningModule,
        micro_batches: MicroBatches,
        rest: tuple[Any, ...],
        scale: float,
        optimizers: OptimizerSet | None,
    ) -> Any:
        """Forward and backward of all micro-batches.

        Args:
            micro_batches: micro-batches of one batch.
            rest: arguments that Lightning passes to the step after the batch.
            scale: factor of each loss in the backward, on top of its micro-batch's share of the batch.
            optimizers: optimizers whose gradients this batch completes; ``None`` if more batches are accumulated.

        Returns:
            Output of one ``training_step`` on the whole batch, without its graph.
        """
        work = TrainingWork(module, micro_batches, rest, self._boundary, scale, self._context)
        layout, rank = self._mesh.layout, self._mesh.pp.rank
        plan = training_plan(self._schedule, layout.pp, layout.vpp, len(micro_batches), rank)
        with kept_generators(self.device) if self._is_pipeline else nullcontext():
            self._runtime.run(plan, work, nullcontext if optimizers is None else optimizers.last_backward)
        if optimizers is not None:
            optimizers.sum_tied()
        self._metrics.step_is_over()
        totals = self._logs.finish("training_step", work.logs, work.totals)
        return work.output(totals, self._on_all_stages(work.extras) if self._shares_outputs else work.extras)

    def _on_all_stages(self, output: Any) -> Any:
        """Output of the last pipeline stage, without its graph."""
        own = apply_to_collection(output, torch.Tensor, torch.Tensor.detach)
        return broadcast_object(own, self._mesh.pp, self._mesh.pp.size - 1, self.device)

    def evaluate(
        self, module: LightningModule, name: str, micro_batches: MicroBatches, rest: tuple[Any, ...], broadcast: bool
    ) -> Any:
        """Run an evaluation step on all micro-batches, and join the outputs.

        ``broadcast`` gives the output to all stages; else only the last one has it. Others: see :meth:`train`.
        """
        work = EvaluationWork(module, getattr(module, name), micro_batches, rest, self._boundary)
        layout, axis = self._mesh.layout, self._mesh.pp
        with kept_generators(self.device) if self._is_pipeline else nullcontext():
            self._runtime.run(evaluation_plan(layout.pp, layout.vpp, len(micro_batches), axis.rank), work)
        self._metrics.step_is_over()
        self._logs.finish(name, work.logs, [])
        return self._on_all_stages(work.output()) if broadcast else work.output()
