"""Faults of jobs that count samples: global batches that a layout cannot divide evenly, and two lengths of training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from lightning.pytorch import Trainer

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.errors import Problem
from lightning_megatron.lightning.streams.sample_plan import SamplePlan, length_problems


@runtime_checkable
class PlansSamples(Protocol):
    """A data module that declares its global batches."""

    @property
    def sample_plan(self) -> SamplePlan:
        """Its global batches, and the end of training."""
        ...


@runtime_checkable
class CountsSamples(Protocol):
    """A module that declares if its schedules count samples."""

    @property
    def counts_samples(self) -> bool:
        """True if the schedules count samples."""
        ...


def count_samples(objects: Sequence[object]) -> bool:
    """True if anything of a job counts samples."""
    plans = any(item.sample_plan.counts_samples for item in objects if isinstance(item, PlansSamples))
    return plans or any(item.counts_samples for item in objects if isinstance(item, CountsSamples))


def sample_problems(
    objects: Sequence[object], layout: ParallelLayout, micro_batch_size: int | None, trainer: Trainer | None
) -> list[Problem]:
    """Faults of a job that counts samples; none for other jobs."""
    found: list[Problem] = []
    if trainer is None or not count_samples(objects):
        return found
    for plan in (item.sample_plan for item in objects if isinstance(item, PlansSamples)):
        found += length_problems(plan, trainer)
        if plan.counts_samples:
            found += plan.layout_problems(layout, micro_batch_size, trainer.accumulate_grad_batches)
    return found
