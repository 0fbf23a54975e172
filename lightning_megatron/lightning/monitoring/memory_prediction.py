"""Predicted memory of a run: logged first, compared with the measured peak, and added to out-of-memory errors."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_megatron import device as devices
from lightning_megatron.lightning.validation.memory import UNKNOWN, MemoryLimit, device_called
from lightning_megatron.machine.byte_size import told_bytes
from lightning_megatron.planning.core.device_file import DeviceSpec
from lightning_megatron.planning.core.job import PlannedJob
from lightning_megatron.planning.memory.peak import memory_of
from lightning_megatron.planning.plan import Plan, communicator_bytes, kernels_of, plan_of
from lightning_megatron.planning.ways_out import ways_out

_log = logging.getLogger(__name__)

MEASURED_AFTER = 2
"""Optimizer steps before the peak is compared: the first one creates states, and the next one gathers parameters."""
_SHARE = 0.9
"""Largest fraction of the predicted peak that a suggestion may need: the run failed, even if the prediction fits."""


class MemoryPrediction:
    """Prediction for the run at hand, if one is possible.

    Attributes:
        job: the job; ``None`` where nothing is predicted.
        limit: memory of the device.
    """

    def __init__(self) -> None:
        self.job: PlannedJob | None = None
        self.limit: MemoryLimit = UNKNOWN
        self._has_measured = False

    def set(self, job: PlannedJob | None, limit: MemoryLimit) -> None:
        """Note the job that is about to run; ``None`` if its memory cannot be predicted."""
        self.job, self.limit, self._has_measured = job, limit, False

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
