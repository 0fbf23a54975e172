"""A rank of any job, rehearsed in one process without its memory.

    found = rehearse_job(job, pipeline_rank=0)              # a PlannedJob
    found.peak, found.moment, found.by_cause, found.after_step, found.after_step_by_cause    # bytes

    found = rehearse(trainer, module, datamodule, rank=0)   # what ``trainer.fit(module, datamodule)`` would run

``torch.distributed`` must not be initialized in the process. The module is not changed. Tensors are fake CPU tensors,
so layers choose the implementations that they choose on a CPU.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only as pl_rank_zero_only
from torch import Tensor

from lightning_megatron.config.layout import BatchShape, HasBatchShape, ParallelLayout
from lightning_megatron.lightning.modules.decoder import GPTModule
from lightning_megatron.lightning.modules.transformer import TransformerModule
from lightning_megatron.lightning.step.precision import MegatronPrecision
from lightning_megatron.lightning.strategy.megatron import MegatronStrategy
from lightning_megatron.lightning.validation.settings import JobSettings
from lightning_megatron.mesh import dense_grid, rank_groups
from lightning_megatron.ops.registry import Ops
from lightning_megatron.tools.planning.core.job import PlannedJob
from lightning_megatron.tools.rehearsal.cut import enough_micro_batches
from lightning_megatron.tools.rehearsal.errors import RehearsalError
from lightning_megatron.tools.rehearsal.known_calls import KnownCalls
from lightning_megatron.tools.rehearsal.measure import StepMeasure
from lightning_megatron.tools.rehearsal.result import Rehearsal
from lightning_megatron.tools.rehearsal.strategy import OneOfMany, RehearsedStrategy
from lightning_megatron.tools.rehearsal.survey import survey_stages
from lightning_megatron.tools.rehearsal.world import FakeWorld

_STEPS = 2
"""Steps of a rehearsal: the first, of few micro-batches, creates the optimizer's state; the second is a usual one."""

_REPLACED: Mapping[str, Any] = {
    "compile": False,
    "gpu_migration": False,
    "async_save": False,
    "max_memory": None,
    "save_on_signal": False,
    "record_actions": False,
    "process_group_backend": None,
    "accelerator": None,
    "parallel_devices": None,
    "cluster_environment": None,
    "checkpoint_io": None,
    "precision_plugin": None,
}
"""Arguments of the strategy that do not affect a step, or that a rehearsal does not support."""


_FP8 = (
    "{}: fp8 products need a Gaudi, and a rehearsal runs the operations of a CPU; rehearse without fp8, and let"
    " lightning-megatron plan predict its memory"
)
_OLD_TORCH = (
    f"a rehearsal needs torch 2.10 or newer, and this is {torch.__version__}: rehearse on another machine, since no"
    " device is needed"
)
_OTHER_STRATEGY = "a rehearsal needs MegatronStrategy; the Trainer has {}"
_WITHOUT_TENSORS = {"ModelSummary", "TQDMProgressBar", "RichProgressBar", "ModelCheckpoint", "LearningRateMonitor"}
"""Callbacks that hold no memory of the device, and need no note."""


@runtime_checkable
class HasExampleBatch(Protocol):
    """A data module whose batches differ from those of ``MegatronDataModule``."""

    def example_batch(self, rows: int) -> dict[str, Tensor]:
        """A batch of ``rows`` samples, as its loaders return it."""
        ...


@dataclass(frozen=True)
class _Batches:
    """Loader of batches.

    Attributes:
        batch_shape: shape of a whole batch of the job, against which the layout is checked.
        batch_size: samples of the largest batch.
        rows: samples of each batch.
        make: function from a number of samples to a batch.
    """

    batch_shape: BatchShape
    batch_size: int
    rows: tuple[int, ...]
    make: Callable[[int], dict[str, Tensor]]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return map(self.make, self.rows)


def rehearse(
    trainer: Trainer,
    module: LightningModule,
    datamodule: object,
    *,
    rank: int = 0,
    world_size: int | None = None,
    imbalance: float = 1.0,
    all_micro_batches: bool = False,
    calls: KnownCalls | None = None,
) -> Rehearsal:
    """Run two steps of one rank on fake tensors, and report its memory, traffic and work.

    Args:
        trainer: Trainer with :class:`MegatronStrategy`; its precision, clipping and accumulation are used, its
            callbacks and loggers are not.
        module: module; its model need not be built yet, and is built again in any case.
        datamodule: data module with the shape of its batches (``batch_shape``), or that :class:`BatchShape` itself.
        rank: global rank.
        world_size: number of ranks; ``None`` for the Trainer's.
        imbalance: tokens of this rank's experts over the mean of all ranks.
        all_micro_batches: True to run all micro-batches of a step, not only as many as reach the schedule's peak.
        calls: cache of calls to share with rehearsals of other ranks; ``None`` for a new one.

    Raises:
        ConfigError: for a job that cannot work.
        RehearsalError: for a program that needs the values of fake tensors.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, MegatronStrategy):
        raise RehearsalError(_OTHER_STRATEGY.format(type(strategy).__name__))
    mode = Ops(modes=strategy.op_modes).mode("linear_fp8")
    if mode != "off":
        raise RehearsalError(_FP8.format(f"linear_fp8={mode} in ops"))
    nodes = (strategy.num_nodes, strategy.num_processes) if world_size is None else (1, world_size)
    shape = datamodule.batch_shape if isinstance(datamodule, HasBatchShape) else datamodule
    if isinstance(shape, BatchShape) and shape.batch_size is None and shape.global_batch_size is not None:
        replicas = replace(strategy.layout, dp=None).resolve(nodes[0] * nodes[1]).data_parallel_size
        shape = replace(shape, batch_size=shape.global_batch_size // replicas)  # no Trainer is attached that says so
    if not isinstance(shape, BatchShape) or shape.batch_size is None or shape.seq_length is None:
        raise RehearsalError("the shape of a batch is not known: give a data module with batch_shape, or a BatchShape")
    make = datamodule.example_batch if isinstance(datamodule, HasExampleBatch) else None
    return _Stage(strategy, trainer, module, shape, nodes, make).perform(rank, imbalance, all_micro_batches, calls)


def rehearse_job(job: PlannedJob, pipeline_rank: int = 0, *, all_micro_batches: bool = False) -> Rehearsal:
    """Run two steps of one rank of a planned job on fake tensors.

    The rank is the first one of a stage: position 0 on every axis but the pipeline.

    Args:
        job: job.
        pipeline_rank: position on the pipeline.
        all_micro_batches: True to run all micro-batches of a step, not only as many as reach the schedule's peak.

    Raises:
        ConfigError: for a job that cannot work.
        RehearsalError: for one that cannot be rehearsed.
    """
    layout = job.layout
    if job.fp8:
        raise RehearsalError(_FP8.format("fp8=True"))
    if job.optimizer_states != 2:
        raise RehearsalError(
            f"optimizer_states={job.optimizer_states}: a planned job is rehearsed with AdamW, which keeps 2 values for"
            " each parameter; rehearse a Trainer and a module with that optimizer"
        )
    strategy = MegatronStrategy(
        layout.tp,
        layout.pp,
        layout.cp,
        layout.ep,
        layout.etp,
        layout.vpp,
        sequence_parallel=layout.sequence_parallel,
        micro_batch_size=job.micro_batch_size,
        pipeline_schedule=job.schedule,  # type: ignore[arg-type]
        cp_comm_type=layout.cp_comm_type,  # type: ignore[arg-type]
        first_stage_layers=job.split.first_stage_layers,
        last_stage_layers=job.split.last_stage_layers,
        count_embedding=job.split.count_embedding,
        count_loss=job.split.count_loss,
        pipeline_layout=job.split.layout,
        distributed_optimizer=job.distributed_optimizer,
        overlap_grad_reduce=job.overlap_grad_reduce,
        overlap_param_gather=job.overlap_param_gather,
        main_grads_dtype=job.main_grads_dtype,  # type: ignore[arg-type]
        grad_reduce_dtype=job.grad_reduce_dtype,  # type: ignore[arg-type]
        bucket_size=job.bucket_size,
        recompute=list(g) if isinstance(g := job.recompute.granularity, tuple) else g,  # type: ignore[arg-type]
        recompute_method=job.recompute.method,
        recompute_num_layers=job.recompute.num_layers,
        recompute_shard_saved=job.recompute.shard_saved,
        ops={"attention": "off"} if job.attention == "reference" else None,
    )
    with _quiet():
        trainer = _trainer(strategy, job.precision, (1, job.world_size), 0, clip=1.0)
    shape = BatchShape(job.micro_batch_size * job.num_micro_batches, job.micro_batch_size, job.seq_length)
    rank = rank_groups(dense_grid(layout), ["pp"])[0][pipeline_rank]
    stage = _Stage(strategy, trainer, GPTModule(job.config), shape, (1, job.world_size))
    return stage.perform(rank, job.expert_imbalance, all_micro_batches)


def ranks_that_differ(trainer: Trainer, world_size: int | None = None) -> list[int]:
    """One rank of the first, of a middle and of the last pipeline stage; one rank without a pipeline.

    Args:
        trainer: Trainer with :class:`MegatronStrategy`.
        world_size: number of ranks; ``None`` for the Trainer's.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, MegatronStrategy):
        raise RehearsalError(_OTHER_STRATEGY.format(type(strategy).__name__))
    world_size = world_size or strategy.num_nodes * strategy.num_processes
    arguments = {name: strategy.settings[name] for name in ("tp", "pp", "cp", "ep", "etp", "vpp")}
    pipeline = rank_groups(dense_grid(ParallelLayout(**arguments).resolve(world_size)), ["pp"])[0]
    return sorted({pipeline[0], pipeline[len(pipeline) // 2], pipeline[-1]})


class _Stage:
    """A job that is rehearsed.

    Args:
        strategy: strategy.
        trainer: Trainer whose settings of a step are used.
        module: module.
        shape: shape of a batch.
        nodes: number of nodes, and ranks of each.
        make: function from a number of samples to a batch; ``None`` for batches of ``MegatronDataModule``.
    """

    def __init__(
        self,
        strategy: MegatronStrategy,
        trainer: Trainer,
        module: LightningModule,
        shape: BatchShape,
        nodes: tuple[int, int],
        make: Callable[[int], dict[str, Tensor]] | None = None,
    ) -> None:
        self._strategy, self._trainer, self._module, self._shape, self._nodes = strategy, trainer, module, shape, nodes
        assert shape.seq_length is not None
        self._make = make or partial(example_batch, length=shape.seq_length, vocabulary=_vocabulary(module))

    def perform(
        self, rank: int, imbalance: float, all_micro_batches: bool, calls: KnownCalls | None = None
    ) -> Rehearsal:
        """Rehearse one rank."""
        if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):
            raise RehearsalError(_OLD_TORCH)
        trainer, shape = self._trainer, self._shape
        assert shape.batch_size is not None
        arguments = {**self._strategy.settings, **_REPLACED}
        job = JobSettings.of(arguments)
        layout = job.layout.resolve(self._nodes[0] * self._nodes[1])
        stages = survey_stages(self._module, layout, job.split, job.recompute)
        size = job.micro_batch_size or shape.batch_size
        number = whole = -(-shape.batch_size // size)
        if not all_micro_batches:
            number = enough_micro_batches(job.pipeline_schedule, layout.pp, layout.vpp, whole)
        accumulated = min(trainer.accumulate_grad_batches, 2)
        world = FakeWorld(rank, layout.world_size, imbalance, calls)
        strategy = RehearsedStrategy(world.join, stages, **arguments)
        measure = StepMeasure(world.tracker, world.place, world.log)
        module = _silent(self._module)
        rows = min(number * size, shape.batch_size)
        first = min(size * (layout.pp if layout.vpp > 1 else 1), rows)
        values = {samples: self._make(samples) for samples in (first, rows)}
        strategy.recorder = world.recorder
        with _quiet(), world.entered():
            fitting = _trainer(
                strategy,
                self._strategy.precision_plugin.precision,
                self._nodes,
                rank,
                clip=trainer.gradient_clip_val,
                gradient_clip_algorithm=trainer.gradient_clip_algorithm,
                accumulate_grad_batches=accumulated,
                callbacks=[measure],
                max_steps=_STEPS,
            )
            sizes = (first,) * accumulated + (rows,) * accumulated
            loader = _Batches(shape, rows, sizes, lambda samples: world.batch(values[samples]))
            fitting.fit(module, loader)
            mesh, tracker = strategy.mesh, world.tracker
        axes = {a.name: (a.rank, a.size) for a in (mesh.tp, mesh.cp, mesh.dp, mesh.pp, mesh.ep, mesh.etp) if a.size > 1}
        model = module.model if isinstance(module, TransformerModule) else None
        layers = [] if model is None else sorted(int(name) for name in model.layers)
        notes = _notes(self._strategy, trainer, (number, whole), accumulated)
        return Rehearsal(
            rank=rank,
            world_size=layout.world_size,
            coordinates=axes,
            layers=tuple(layers),
            micro_batches=number,
            peak=measure.peak,
            peak_without_pieces=measure.peak_without_pieces,
            moment=measure.moment,
            by_cause=measure.by_cause,
            after_step=measure.after_step,
            after_step_by_cause=measure.after_by_cause,
            setup_peak=measure.setup_peak,
            traffic=measure.traffic,
            flops=tracker.flops,
            kernels=dict(tracker.kernels.most_common()),
            notes=notes,
        )


def _notes(
    strategy: MegatronStrategy, trainer: Trainer, micro_batches: tuple[int, int], accumulated: int
) -> tuple[str, ...]:
    """Differences between the rehearsal and the run."""
    found = ["layers run the operations of a CPU, on fake tensors"]
    rehearsed, whole = micro_batches
    if rehearsed < whole:
        found.append(f"{rehearsed} of {whole} micro-batches of a batch, which fill the schedule as all of them do")
    if accumulated < trainer.accumulate_grad_batches:
        found.append(f"{accumulated} of {trainer.accumulate_grad_batches} accumulated batches")
    if strategy.settings.get("compile"):
        found.append("no torch.compile: every operation by itself, which keeps and makes more than compiled blocks")
    names = {type(callback).__name__ for callback in trainer.callbacks}  # type: ignore[attr-defined]
    if names := names - _WITHOUT_TENSORS:
        found.append(f"without callbacks: {', '.join(sorted(names))}")
    return tuple(found)


def _trainer(
    strategy: MegatronStrategy, precision: str, nodes: tuple[int, int], rank: int, clip: float | None, **options: Any
) -> Trainer:
    """Trainer of a job that starts no process and writes nothing."""
    return Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=nodes[1],
        num_nodes=nodes[0],
        plugins=[OneOfMany(rank, nodes[0] * nodes[1], nodes[1]), MegatronPrecision(precision)],
        gradient_clip_val=clip,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        **options,
    )


def _silent(module: LightningModule) -> LightningModule:
    """Copy of a module that logs nothing: Lightning's metrics copy their states, which fake tensors do not allow.

    An attribute of this one object hides the methods of its class, as in ``log_capture.py``.
    """
    module = module.unbuilt_copy() if isinstance(module, TransformerModule) else copy.deepcopy(module)
    for name in ("log", "log_dict"):
        object.__setattr__(module, name, _ignore)
    return module


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Log nothing."""


def _vocabulary(module: object) -> int:
    return module.config.vocab_size if isinstance(module, GPTModule) else 1 << 15


def example_batch(rows: int, length: int, vocabulary: int) -> dict[str, Tensor]:
    """A batch like those of ``MegatronDataModule``."""
    ids = torch.arange(rows * length + 1) % vocabulary
    return {
        "tokens": ids[:-1].view(rows, length),
        "labels": ids[1:].view(rows, length),
        "loss_mask": torch.ones(rows, length),
        "position_ids": torch.arange(length).repeat(rows, 1),
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Lightning's lines about this machine's devices; restore the ranks of ``rank_zero_only`` at the end."""
    log = logging.getLogger("lightning.pytorch")
    level, ranks = log.level, (rank_zero_only.rank, pl_rank_zero_only.rank)  # type: ignore[attr-defined]
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
        rank_zero_only.rank, pl_rank_zero_only.rank = ranks  # type: ignore[attr-defined]
