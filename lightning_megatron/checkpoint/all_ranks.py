"""Ranks agree: a step that fails on one rank fails on all of them, with one text, and none waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from lightning_megatron.comm.objects import all_gather_object
from lightning_megatron.errors import CheckpointError, MissingCheckpointError
from lightning_megatron.mesh import ParallelMesh

T = TypeVar("T")


def on_all_ranks(mesh: ParallelMesh, doing: str, step: Callable[[], T]) -> T:
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
    faults = {rank: found for rank, found in enumerate(all_gather_object(mesh, fault)) if found is not None}
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
