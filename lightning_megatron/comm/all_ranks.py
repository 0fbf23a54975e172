"""Steps that fail on all ranks if they fail on one, with the same text, so that no rank waits forever."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from lightning_megatron.comm.objects import all_gather_object
from lightning_megatron.errors import CheckpointError, MissingCheckpointError, described
from lightning_megatron.mesh import ParallelMesh

T = TypeVar("T")


def on_all_ranks(mesh: ParallelMesh, action: str, step: Callable[[], T]) -> T:
    """Run a step on every rank and return its own result.

    Args:
        mesh: ranks that run the step together.
        action: description of the step for the error text (``"saving run/last.ckpt"``).
        step: function to run; without collectives.

    Raises:
        CheckpointError: on every rank, if the step raised on any.
    """
    result, fault = None, None
    try:
        result = step()
    except Exception as error:
        fault = _Fault(_text_of(error), isinstance(error, MissingCheckpointError))
        if not mesh.is_distributed:
            raise _failed(action, {0: fault}, mesh) from error
    faults = {rank: found for rank, found in enumerate(all_gather_object(mesh, fault)) if found is not None}
    if faults:
        raise _failed(action, faults, mesh)
    return result  # type: ignore[return-value]


class _Fault(NamedTuple):
    """The fault of one rank; ``is_missing`` is true for a checkpoint that does not exist."""

    text: str
    is_missing: bool


def _text_of(error: BaseException) -> str:
    """Text of an error; of the operating system's error if one caused it, which torch's writer hides."""
    if isinstance(error, CheckpointError):
        return str(error)
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OSError) and cause.errno):
        cause = cause.__cause__ or cause.__context__
    return described(cause or error)


def _failed(action: str, faults: dict[int, _Fault], mesh: ParallelMesh) -> CheckpointError:
    kind = MissingCheckpointError if all(fault.is_missing for fault in faults.values()) else CheckpointError
    if len(faults) == mesh.world.size and len(set(faults.values())) == 1:
        return kind(f"{action}: {faults[0].text}")
    return kind(f"{action}:\n" + "\n".join(f"  rank {rank}: {fault.text}" for rank, fault in faults.items()))
