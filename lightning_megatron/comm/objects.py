"""Communication of Python objects: tensors are sent as tensors, the rest is pickled."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning_utilities.core.imports import RequirementCache
from torch import Tensor

from lightning_megatron.comm.collectives import broadcast_in_place
from lightning_megatron.device import barrier_device_ids
from lightning_megatron.mesh import Axis, ParallelMesh
from lightning_megatron.recorder.file_format import Kind

T = TypeVar("T")
_FREED_WITHOUT_THE_LOCK = bool(RequirementCache("torch>=2.7"))


def broadcast_object(value: Any, axis: Axis, source: int, device: torch.device) -> Any:
    """Broadcast an object from position ``source`` of the axis; tensors in it arrive on ``device``.

    Args:
        value: tensors and picklable objects, in dicts, lists and tuples; ignored except at the source.
        axis: the ranks that take part.
        source: position on the axis.
        device: device of the tensors, which the backend must support.
    """
    if axis.size == 1:
        return value
    tensors: list[Tensor] = []
    sent = broadcast_pickled(_take(value, tensors) if axis.rank == source else None, axis, axis.ranks[source], device)
    if axis.rank != source:
        tensors = [torch.empty(s.shape, dtype=s.dtype, device=device) for s in _slots(sent)]
    for tensor in tensors:
        broadcast_in_place(tensor, axis, source)
    return value if axis.rank == source else _put(sent, iter(tensors))


def broadcast_pickled(value: Any, axis: Axis, source: int, device: torch.device | None = None) -> Any:
    """Broadcast an object, pickled with its tensors.

    Args:
        value: object; ignored except at the source.
        axis: the ranks that take part; all ranks, if it has no group.
        source: rank of the source in the job.
        device: device of the bytes, which the backend must support; ``None`` for that of the backend.
    """
    box = [value]
    axis.call(Kind.BROADCAST_OBJECT).run(dist.broadcast_object_list, box, source, group=axis.group, device=device)
    return box[0]


def barrier(axis: Axis, device: torch.device) -> None:
    """Wait for all ranks of the axis; of the job, if it has no group."""
    axis.call(Kind.BARRIER).run(dist.barrier, axis.group, device_ids=barrier_device_ids(device))


def barrier_with_limit(mesh: ParallelMesh, limit: timedelta) -> None:
    """Wait for all ranks of the job for a limited time.

    Raises:
        RuntimeError: names the ranks that have not arrived.
    """
    dist.monitored_barrier(mesh.host_group, timeout=limit)


def all_gather_object(mesh: ParallelMesh, value: T) -> list[T]:
    """The values of all ranks, by rank."""
    return all_gather_object_over(mesh.host, value)


def all_gather_object_over(axis: Axis, value: T) -> list[T]:
    """The values of all ranks of an axis whose group is on the host, by position."""
    values: list[T] = [value] * axis.size
    if axis.size > 1:
        axis.call(Kind.ALL_GATHER_OBJECT).run(dist.all_gather_object, values, value, group=axis.group)
    return values


def gather_object(mesh: ParallelMesh, value: T) -> list[T] | None:
    """The values of all ranks, by rank, on rank 0; ``None`` on the others."""
    if not mesh.is_distributed:
        return [value]
    values: list[T] | None = [value] * mesh.world.size if mesh.rank == 0 else None
    mesh.host.call(Kind.GATHER_OBJECT).run(dist.gather_object, value, values, dst=0, group=mesh.host_group)
    return values


def scatter_object(mesh: ParallelMesh, values: list[T] | None) -> T:
    """This rank's entry of the list of values that rank 0 passes."""
    if not mesh.is_distributed:
        assert values is not None
        return values[0]
    own: list[T | None] = [None]
    mesh.host.call(Kind.SCATTER_OBJECT).run(dist.scatter_object_list, own, values, src=0, group=mesh.host_group)
    return own[0]  # type: ignore[return-value]


def drain_group(group: dist.ProcessGroup | None) -> None:
    """Wait until the threads of a gloo group have freed the tensors of earlier collectives; all its ranks call this.

    Up to torch 2.6, destroying a group waits for its threads while holding Python's global lock. A thread that has yet
    to free a tensor needs that lock, and the job hangs. A barrier holds no tensor and runs after all earlier
    collectives. A group has two threads, so the sleep gives time to the one that does not run the barrier.
    """
    dist.barrier(group)
    if not _FREED_WITHOUT_THE_LOCK:
        time.sleep(0.1)


class _Slot:
    """Placeholder of a tensor in the pickled object."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


def _take(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value.detach().contiguous())
        return _Slot(value)
    if isinstance(value, dict):
        return {key: _take(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_take(item, tensors) for item in value)
    return value


def _slots(value: Any) -> list[_Slot]:
    if isinstance(value, _Slot):
        return [value]
    items = value.values() if isinstance(value, dict) else value if type(value) in (list, tuple) else ()
    return [slot for item in items for slot in _slots(item)]


def _put(value: Any, tensors: Any) -> Any:
    if isinstance(value, _Slot):
        return next(tensors)
    if isinstance(value, dict):
        return {key: _put(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_put(item, tensors) for item in value)
    return value
