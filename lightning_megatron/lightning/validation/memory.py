"""Check, before processes start, of a job's predicted memory against the memory of its devices."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.trainer.states import TrainerFn

from lightning_megatron.config.layout import BatchShape, ParallelLayout
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import ConfigError, Problem
from lightning_megatron.lightning.validation.settings import JobSettings
from lightning_megatron.machine.byte_size import memory_bytes, told_bytes
from lightning_megatron.ops.implementation import REFERENCE
from lightning_megatron.ops.registry import Ops
from lightning_megatron.planning.core.communicators import num_communicators
from lightning_megatron.planning.core.device_file import DeviceSpec, device_names, load_device
from lightning_megatron.planning.core.job import PRECISIONS, PlannedJob
from lightning_megatron.planning.plan import plan_of
from lightning_megatron.planning.settings import Feed, job_of, layout_words
from lightning_megatron.planning.ways_out import ways_out

TOLERANCE = 1.05
"""Factor by which a prediction, which may err, may exceed a device's memory if the user gives no ``max_memory``."""


@dataclass(frozen=True)
class TrainedModel:
    """The properties of a module's trained model on which memory depends.

    Attributes:
        config: its shape; all parameters are trained.
        optimizer_states: values that the optimizer keeps for each parameter; ``None`` if unknown.
    """

    config: TransformerConfig
    optimizer_states: int | None


@runtime_checkable
class HasTrainedModel(Protocol):
    """A module that knows, before it is built, what it trains."""

    @property
    def trained_model(self) -> TrainedModel | None:
        """The model; ``None`` if a subclass builds another one."""
        ...


@dataclass(frozen=True)
class MemoryLimit:
    """Memory of a device for the tensors of a rank.

    Attributes:
        size: bytes; ``None`` if unknown.
        device: name of the device, as its software reports it.
        asked: True if the user has given the size as ``max_memory``.
    """

    size: int | None = None
    device: str = ""
    asked: bool = False


UNKNOWN = MemoryLimit()


def planned_job(
    settings: JobSettings, layout: ParallelLayout, ops: Ops, batch: BatchShape, objects: tuple[object, ...]
) -> PlannedJob | None:
    """The job in numbers; ``None`` unless module, batches, precision and Trainer are known, and nothing is frozen."""
    model = next((item.trained_model for item in objects if isinstance(item, HasTrainedModel)), None)
    trainer = next((item for item in objects if isinstance(item, Trainer)), None)
    if model is None or trainer is None or not _trains_all(trainer):
        return None
    precision = str(trainer.precision)
    if layout.dp is None or not batch.batch_size or not batch.seq_length or precision not in PRECISIONS:
        return None
    feed = Feed(layout.world_size, batch.seq_length, batch.batch_size, trainer.accumulate_grad_batches, precision)
    attention = "reference" if ops.choose("attention").implementation == REFERENCE else "flash"
    with suppress(ConfigError):  # reported by the checks of the layout
        return job_of(
            model.config,
            feed,
            settings.arguments,
            fp8=ops.mode("linear_fp8") != "off",
            attention=attention,
            optimizer_states=model.optimizer_states or 0,
        )
    return None


def _trains_all(trainer: Trainer) -> bool:
    """True for a fit in which no callback freezes parameters."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return trainer.state.fn == TrainerFn.FITTING and not any(isinstance(each, BaseFinetuning) for each in callbacks)


def limit_of(settings: JobSettings, device_bytes: int | None, name: str) -> MemoryLimit:
    """Memory that a rank may use: the user's ``max_memory``, else the memory of the device."""
    asked = memory_bytes(settings.max_memory)
    return MemoryLimit(device_bytes if asked is None else asked, name, asked is not None)


def memory_problem(job: PlannedJob, limit: MemoryLimit) -> list[Problem]:
    """The fault of a layout that does not fit, with changes that would make it fit."""
    if limit.size is None:
        return []
    device = device_called(limit.device)
    plan = plan_of(job, limit.size, device, timed=False)
    taken = plan.communicator_bytes
    if plan.memory.peak + taken <= limit.size * (1.0 if limit.asked else TOLERANCE):
        return []
    cause = plan.memory.largest_cause
    where = f" on pipeline rank {plan.pipeline_rank}" if job.layout.pp > 1 else ""
    reason = (
        f"the layout {layout_words(job)} needs {told_bytes(plan.memory.peak)} a rank{where}, most of it"
        f" {cause}: {told_bytes(plan.memory.by_cause[cause])}"
    )
    if taken:
        reason += f"; {num_communicators(job.layout)} communicators take {told_bytes(taken)} more"
    ways = tuple(str(way) for way in ways_out(job, limit.size, device))
    if limit.asked:
        return [Problem("max_memory", told_bytes(limit.size), reason, ways)]
    reason += f", and {limit.device} has {told_bytes(limit.size)}; a larger max_memory lets it run nevertheless"
    return [Problem("max_memory", None, reason, ways)]


def device_called(name: str) -> DeviceSpec | None:
    """Specification of a device by the name that its software reports; ``None`` if there is none."""
    told = name.upper().replace(" ", "").replace("-", "")
    known = sorted(device_names(), key=lambda each: -len(each))
    found = next((each for each in known if each.split("-")[0].upper() in told), None)
    return None if found is None else load_device(found)
