"""A job with its predicted memory and time, compared with the available memory."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_megatron.tools.planning.core.communicators import num_communicators
from lightning_megatron.tools.planning.core.device_file import DeviceSpec
from lightning_megatron.tools.planning.core.job import PlannedJob
from lightning_megatron.tools.planning.memory.estimate import MemoryEstimate
from lightning_megatron.tools.planning.memory.peak import worst_memory
from lightning_megatron.tools.planning.memory.shapes import ACCELERATOR, ADDING, HOST, Kernels
from lightning_megatron.tools.planning.time.step import TimeEstimate, time_of

ALLOCATOR_KEEPS = (0.06, 0.43)
"""Least and most that allocators had reserved beyond what tensors take, as shares, in published runs (docs/plan.md)."""


@dataclass(frozen=True)
class Plan:
    """A job with its predicted memory and time.

    Attributes:
        job: the job.
        pipeline_rank: pipeline rank that needs most memory.
        memory: memory of that rank.
        limit: bytes that tensors of a rank may take, beside its communicators; ``None`` if unknown.
        time: time of a step; ``None`` where no device is known.
        communicator_bytes: memory of the rank's communicators, which is no part of ``memory``.
    """

    job: PlannedJob
    pipeline_rank: int
    memory: MemoryEstimate
    limit: int | None
    time: TimeEstimate | None
    communicator_bytes: int = 0

    @property
    def is_tight(self) -> bool:
        """True if it fits, but not with the least that an allocator keeps beyond what tensors take."""
        return self.fits and self.limit is not None and self.memory.peak * (1 + ALLOCATOR_KEEPS[0]) > self.limit

    @property
    def fits(self) -> bool:
        """True if the memory is within the limit, or the limit is unknown."""
        return self.limit is None or self.memory.peak <= self.limit


def plan_of(job: PlannedJob, limit: int | None, device: DeviceSpec | None = None, *, timed: bool = True) -> Plan:
    """Predict memory and, on a known device, time of a job.

    Args:
        limit: bytes that tensors and communicators of a rank may take; ``None`` for no limit.
        device: device that it runs on; ``None`` for an unknown accelerator.
        timed: False to predict memory only.
    """
    time = time_of(job, device) if timed and device is not None else None
    taken = communicator_bytes(job, device)
    return Plan(job, *worst_memory(job, kernels_of(device)), None if limit is None else limit - taken, time, taken)


def communicator_bytes(job: PlannedJob, device: DeviceSpec | None) -> int:
    """Memory that the communicators of a rank take on a device; 0 where no figure is known."""
    return 0 if device is None else num_communicators(job.layout) * device.communicator_bytes


def kernels_of(device: DeviceSpec | None) -> Kernels:
    """Properties of a device's kernels on which memory depends."""
    if device is None or device.asynchronous:
        return ADDING if device is not None and device.adds_products else ACCELERATOR
    return HOST
