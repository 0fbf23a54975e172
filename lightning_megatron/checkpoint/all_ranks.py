"""Ranks agree: a step that fails on one rank fails on all of them, with one text, and none waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.recorder.form import Kind

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved or loaded; the text says which, why, and what to do."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """There is nothing at the path of a checkpoint."""


def gathered(mesh: ParallelMesh, value: T) -> list[T]:
    """What every rank gave, by rank."""
    if not mesh.is_distributed:
        return [value]
    values: list[T] = [value] * mesh.world.size
    mesh.host.call(Kind.ALL_GATHER_OBJECT).run(dist.all_gather_object, values, value, group=mesh.host_group)
    return values


def collected(mesh: ParallelMesh, value: T) -> list[T] | None:
    """What every rank gave, by rank, on rank 0; ``None`` elsewhere."""
    if not mesh.is_distributed:
        return [value]
    values: list[T] | None = [value] * mesh.world.size if mesh.rank == 0 else None
    mesh.host.call(Kind.GATHER_OBJECT).run(dist.gather_object, value, values, dst=0, group=mesh.host_group)
    return values


def dealt(mesh: ParallelMesh, values: list[T] | None) -> T:
    """Each rank's own of what rank 0 gives, by rank."""
    if not mesh.is_distributed:
        assert values is not None
        return values[0]
    own: list[T | None] = [None]
    mesh.host.call(Kind.SCATTER_OBJECT).run(dist.scatter_object_list, own, values, src=0, group=mesh.host_group)
    return own[0]  # type: ignore[return-value]


def together(mesh: ParallelMesh, doing: str, step: Callable[[], T]) -> T:
    """Run a step on every rank and return its own result.

    Args:
        mesh: who takes part.
        doing: what fails, for the error text (``"saving run/last.ckpt"``).
        step: what to run; without collectives.

    Raises:
        CheckpointError: on every rank, if the step raised on any.
    """
    result, fault = None, None
    try:
        result = step()
    except Exception as error:
        fault = _Fault(_told(error), isinstance(error, MissingCheckpointError))
        if not mesh.is_distributed:
            raise _failed(doing, {0: fault}, mesh) from error
    faults = {rank: found for rank, found in enumerate(gathered(mesh, fault)) if found is not None}
    if faults:
        raise _failed(doing, faults, mesh)
    return result  # type: ignore[return-value]


class _Fault(NamedTuple):
    """The fault of one rank, and whether it is a missing file."""

    text: str
    is_missing: bool


def _told(error: BaseException) -> str:
    """The text of an error; of torch's writer, which trips over what the system refuses, what the system says."""
    if isinstance(error, CheckpointError):
        return str(error)
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OSError) and cause.errno):
        cause = cause.__cause__ or cause.__context__
    told = cause or error
    return f"{type(told).__name__}: {told}"


def _failed(doing: str, faults: dict[int, _Fault], mesh: ParallelMesh) -> CheckpointError:
    kind = MissingCheckpointError if all(fault.is_missing for fault in faults.values()) else CheckpointError
    if len(faults) == mesh.world.size and len(set(faults.values())) == 1:
        return kind(f"{doing}: {faults[0].text}")
    return kind(f"{doing}:\n" + "\n".join(f"  rank {rank}: {fault.text}" for rank, fault in faults.items()))
