"""The forecast of a run's memory: a refusal, a log line, a comparison with what was measured, and a way out.

``extensions.py`` names :func:`forecast_of`, which the checks before a run call.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from lightning_megatron import device as devices
from lightning_megatron.errors import ConfigError, Problem
from lightning_megatron.lightning.validation.job import Job
from lightning_megatron.lightning.validation.memory import HasTrainedModel, MemoryForecast, MemoryLimit
from lightning_megatron.machine.byte_size import told_bytes
from lightning_megatron.ops.implementation import REFERENCE
from lightning_megatron.tools.planning.core.communicators import num_communicators
from lightning_megatron.tools.planning.core.device_file import DeviceSpec, device_names, load_device
from lightning_megatron.tools.planning.core.job import PRECISIONS, PlannedJob
from lightning_megatron.tools.planning.memory.peak import memory_of
from lightning_megatron.tools.planning.plan import Plan, communicator_bytes, kernels_of, plan_of
from lightning_megatron.tools.planning.settings import Feed, job_of, layout_words
from lightning_megatron.tools.planning.ways_out import ways_out

_log = logging.getLogger(__name__)

MEASURED_AFTER = 2
"""Optimizer steps before the peak is compared: the first one creates states, and the next one gathers parameters."""
_SHARE = 0.9
"""Largest fraction of the predicted peak that a suggestion may need: the run failed, even if the prediction fits."""
TOLERANCE = 1.05
"""Factor by which a prediction, which may err, may exceed a device's memory if the user gives no ``max_memory``."""


def forecast_of(job: Job) -> Forecast:
    """Forecast of a job's memory."""
    return Forecast(planned_job(job), job.memory_limit)


class Forecast(MemoryForecast):
    """Forecast for a job.

    Attributes:
        job: the job in numbers; ``None`` where nothing can be predicted.
        limit: memory of the device.
    """

    def __init__(self, job: PlannedJob | None, limit: MemoryLimit) -> None:
        self.job, self.limit = job, limit
        self._has_measured = False

    def problems(self) -> list[Problem]:
        """The fault of a layout that does not fit, with changes that would make it fit."""
        if self.job is None or self.limit.size is None:
            return []
        device = self._device
        plan = plan_of(self.job, self.limit.size, device, timed=False)
        taken = plan.communicator_bytes
        if plan.memory.peak + taken <= self.limit.size * (1.0 if self.limit.asked else TOLERANCE):
            return []
        cause = plan.memory.largest_cause
        where = f" on pipeline rank {plan.pipeline_rank}" if self.job.layout.pp > 1 else ""
        reason = (
            f"the layout {layout_words(self.job)} needs {told_bytes(plan.memory.peak)} a rank{where}, most of it"
            f" {cause}: {told_bytes(plan.memory.by_cause[cause])}"
        )
        if taken:
            reason += f"; {num_communicators(self.job.layout)} communicators take {told_bytes(taken)} more"
        ways = tuple(str(way) for way in ways_out(self.job, self.limit.size, device))
        if self.limit.asked:
            return [Problem("max_memory", told_bytes(self.limit.size), reason, ways)]
        reason += (
            f", and {self.limit.device} has {told_bytes(self.limit.size)}; a larger max_memory lets it run nevertheless"
        )
        return [Problem("max_memory", None, reason, ways)]

    def _plan(self) -> Plan | None:
        return None if self.job is None else plan_of(self.job, self.limit.size, self._device, timed=False)

    @property
    def _device(self) -> DeviceSpec | None:
        return device_called(self.limit.device)

    def announce(self, name: str) -> None:
        """Log the prediction in one line, after the strategy's name, and at level DEBUG its parts by cause."""
        plan = self._plan()
        if plan is None:
            return
        rank_zero_info(f"{name}: {_predicted(plan)}")
        for cause, size in plan.memory.by_cause.items():
            _log.debug("predicted memory: %s %s", cause, told_bytes(size))

    def measure(self, name: str, step: int, device: torch.device, pipeline_rank: int) -> None:
        """Log once the measured peak of the first steps and its prediction, on devices that count their memory.

        On CUDA it also logs the memory that is not in tensors: communicators, libraries and other processes hold it.

        ``step`` is the number of optimizer steps so far.
        """
        if self._has_measured or step < MEASURED_AFTER or device.type == devices.CPU.type:
            return
        self._has_measured = True
        if (beside := devices.memory_beside_tensors(device)) is not None:
            guess = 0 if self.job is None else communicator_bytes(self.job, self._device)
            known = f", {told_bytes(guess)} of it predicted for communicators" if guess else ""
            rank_zero_info(f"{name}: {told_bytes(beside)} of rank 0's device are not in tensors{known}")
        if self.job is None:
            return
        predicted, measured = (
            memory_of(self.job, pipeline_rank, kernels_of(self._device)).peak,
            devices.peak_memory_bytes(device),
        )
        rank_zero_info(
            f"{name}: peak memory of rank 0 after {step} steps {told_bytes(measured)}, "
            f"predicted {told_bytes(predicted)} ({measured / predicted - 1:+.1%})"
        )

    def explain(self, error: BaseException) -> None:
        """Add the prediction and the cheapest ways out to an out-of-memory error."""
        plan = self._plan()
        if plan is None or not devices.is_out_of_memory(error):
            return
        note = "\n".join(self._explanation(plan))
        if hasattr(error, "add_note"):
            error.add_note(note)
        else:  # Python 3.10
            _log.error("%s", note)

    def _explanation(self, plan: Plan) -> Iterator[str]:
        yield _predicted(plan) + "; by cause:"
        causes = sorted(plan.memory.by_cause.items(), key=lambda item: -item[1])
        yield "  " + ", ".join(f"{cause} {told_bytes(size)}" for cause, size in causes if size)
        peak = plan.memory.peak
        limit = int(_SHARE * peak if self.limit.size is None else min(_SHARE * peak, self.limit.size))
        ways = ways_out(plan.job, limit, self._device)
        yield "the cheapest ways out:" if ways else "no layout near it needs less: take more devices"
        for way in ways:
            yield f"  - {way}"


def _predicted(plan: Plan) -> str:
    memory, where = plan.memory, f" (pipeline rank {plan.pipeline_rank})" if plan.job.layout.pp > 1 else ""
    cause = memory.largest_cause
    return (
        f"predicted memory of a rank {told_bytes(memory.peak)}{where} in {memory.moment}, "
        f"most of it {cause}: {told_bytes(memory.by_cause[cause])}"
    )


def planned_job(job: Job) -> PlannedJob | None:
    """The job in numbers; ``None`` unless module, batches, precision and Trainer are known, and nothing is frozen."""
    objects, layout, batch, ops = (*job.objects, job.trainer), job.layout, job.batch, job.ops
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
            job.settings.arguments,
            fp8=ops.mode("linear_fp8") != "off",
            attention=attention,
            optimizer_states=model.optimizer_states or 0,
        )
    return None


def _trains_all(trainer: Trainer) -> bool:
    """True for a fit in which no callback freezes parameters."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return trainer.state.fn == TrainerFn.FITTING and not any(isinstance(each, BaseFinetuning) for each in callbacks)


def device_called(name: str) -> DeviceSpec | None:
    """Specification of a device by the name that its software reports; ``None`` if there is none."""
    told = name.upper().replace(" ", "").replace("-", "")
    known = sorted(device_names(), key=lambda each: -len(each))
    found = next((each for each in known if each.split("-")[0].upper() in told), None)
    return None if found is None else load_device(found)
