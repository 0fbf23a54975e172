"""Memory of one job by two ways: a rehearsal on fake tensors, and a run of real processes under the same tracker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_megatron.config.layout import BatchShape
from lightning_megatron.lightning.modules.decoder import GPTModule
from lightning_megatron.lightning.strategy.megatron import MegatronStrategy
from lightning_megatron.testing.trainer import quiet_trainer
from lightning_megatron.tools.rehearsal.context import PlaceLog, RunningPlace
from lightning_megatron.tools.rehearsal.measure import StepMeasure
from lightning_megatron.tools.rehearsal.rehearse import example_batch, rehearse
from lightning_megatron.tools.rehearsal.routing import choices_on
from lightning_megatron.tools.rehearsal.strategy import OneOfMany
from lightning_megatron.tools.rehearsal.tracker import StorageTracker
from lightning_megatron.tools.rehearsal.world import TOPK

STEPS = 8
"""Steps of a real run; the first three compare replicas, which a rehearsal leaves out."""
_FIRST = 3


@dataclass(frozen=True)
class SmallJob:
    """A job that a few processes of a CPU can run.

    Attributes:
        preset: model preset.
        world_size: number of ranks.
        batch_size: samples of a batch of one replica.
        seq_length: tokens of a sample.
        precision: precision by Lightning's name.
        model: fields of the preset to change.
        strategy: arguments of the strategy.
    """

    preset: str
    world_size: int
    batch_size: int
    seq_length: int
    precision: str = "bf16-mixed"
    model: Mapping[str, Any] = field(default_factory=dict)
    strategy: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """Bytes of one rank.

    Attributes:
        peak: peak of a step; of a real run the lowest of all steps, since a thread of gloo may hold a buffer longer.
        after_step: bytes after the last step.
        moment: moment of the peak.
        by_cause: bytes at that moment, by cause.
    """

    peak: int
    after_step: int
    moment: str
    by_cause: Mapping[str, int]


class _EvenlyRouted(StorageTracker):
    """Tracker that makes routers choose experts evenly, as in a rehearsal, since the experts' memory depends on it.

    Args:
        place: place of the program.
        strategy: strategy of the run, which makes the mesh.
    """

    def __init__(self, place: RunningPlace, strategy: MegatronStrategy) -> None:
        super().__init__(place)
        self._place, self._strategy = place, strategy

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func is TOPK and self._place.is_choosing(args[0]):
            out[1].copy_(choices_on(self._strategy.mesh.ep, out[1].shape, args[0].shape[-1], 1.0))
        return out


def run_measured(job: SmallJob) -> Measured:
    """Run a job on this rank of the process group, with real tensors and even routing."""
    torch.manual_seed(0)
    strategy = MegatronStrategy(**{"micro_batch_size": 1, **job.strategy})
    log = strategy.recorder.main = PlaceLog(strategy.recorder)
    place = RunningPlace(log)
    tracker = _EvenlyRouted(place, strategy)

    def end_forward() -> None:
        tracker.end_forward()
        place.leave_all()

    log.ends_forward = end_forward
    measure = StepMeasure(tracker, place, log, first=_FIRST)
    rows = [{name: value[0] for name, value in example_batch(1, job.seq_length, 1 << 8).items()}] * (
        job.batch_size * STEPS * job.world_size
    )
    trainer = quiet_trainer(
        strategy,
        precision=job.precision,
        max_steps=STEPS,
        gradient_clip_val=1.0,
        callbacks=[measure],
        limit_val_batches=0,
        log_every_n_steps=1000,
    )
    try:
        with tracker:
            trainer.fit(GPTModule(job.preset, **job.model), DataLoader(rows, batch_size=job.batch_size))  # type: ignore[arg-type]
    finally:
        place.close()
    return Measured(min(measure.peaks), measure.after_step, measure.moment, measure.by_cause)


def rehearse_measured(job: SmallJob, rank: int) -> Measured:
    """Rehearse one rank of the same job, all of its micro-batches."""
    trainer = Trainer(
        accelerator="cpu",
        strategy=MegatronStrategy(**{"micro_batch_size": 1, **job.strategy}),
        devices=job.world_size,
        plugins=[OneOfMany(rank, job.world_size, job.world_size)],
        precision=job.precision,  # type: ignore[arg-type]
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    shape = BatchShape(job.batch_size, 1, job.seq_length)
    found = rehearse(trainer, GPTModule(job.preset, **job.model), shape, rank=rank, all_micro_batches=True)
    return Measured(found.peak, found.after_step, found.moment, found.by_cause)
