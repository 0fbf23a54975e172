"""HCCL: importing it reads the rank from the environment, chooses a card, and registers the backend."""

from __future__ import annotations

import inspect
import os

import torch._dynamo
import torch.distributed as dist
from simulated_hpu import process_group

_MPI = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
_RANKS = ("WORLD_SIZE", "RANK", "LOCAL_RANK")
_COLLECTIVES = [
    *("all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather"),
    *("irecv", "isend", "recv", "reduce", "scatter", "send"),
]
_TOO_FEW = (
    "There is not enough devices\n available for training. Please verify if HABANA_VISIBLE_MODULES\n is set correctly."
)


def initialize_distributed_hpu(
    world_size: int | None = None, rank: int | None = None, local_rank: int | None = None
) -> tuple[int, int, int]:
    """Determine this process's rank and card.

    Args:
        world_size: processes; taken from the environment unless all three are given.
        rank: of this process.
        local_rank: of this process on its machine.

    Returns:
        The three as they are now; 1 process and ranks of -1 if nothing is known.
    """
    if world_size is not None and rank is not None and local_rank is not None:
        os.environ.update(WORLD_SIZE=str(world_size), RANK=str(rank), LOCAL_RANK=str(local_rank))
    else:
        _read_mpi()
    found = (
        int(os.environ.get("WORLD_SIZE", 1)),
        int(os.environ.get("RANK", -1)),
        int(os.environ.get("LOCAL_RANK", -1)),
    )
    _choose_card(found[0], found[2])
    if found[1] != -1:
        os.environ["ID"] = str(found[1])
    return found


def _read_mpi() -> None:
    """Set ranks from MPI's variables unless the usual ones are set, and a default address of one machine."""
    if not all(name in os.environ for name in _RANKS) and all(name in os.environ for name in _MPI):
        os.environ.update({name: os.environ[given] for name, given in zip(_RANKS, _MPI, strict=True)})
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "12345")


def _choose_card(world_size: int, local_rank: int) -> None:
    """Choose one card for a process, once: ``HLS_MODULE_ID`` is never overwritten."""
    if "HLS_MODULE_ID" in os.environ or local_rank == -1 or world_size == 1:
        return
    if "HABANA_VISIBLE_MODULES" not in os.environ:
        os.environ["HLS_MODULE_ID"] = str(local_rank)
        return
    visible = os.environ["HABANA_VISIBLE_MODULES"].split(",")
    assert local_rank < len(visible), _TOO_FEW
    os.environ["HLS_MODULE_ID"] = visible[local_rank]


def _disallow_collectives_in_graphs() -> None:
    """Make ``torch.compile`` break a graph at each function of torch.distributed that communicates."""
    disallow = torch._dynamo.decorators._disallow_in_graph_helper(throw_if_not_allowed=False)
    members = (getattr(dist, name) for name in dir(dist) if name != "reduce_op")  # a deprecated name, which warns
    for function in members:
        if inspect.isfunction(function) and any(part in function.__name__ for part in _COLLECTIVES):
            disallow(function)


initialize_distributed_hpu()
process_group.register()
_disallow_collectives_in_graphs()
