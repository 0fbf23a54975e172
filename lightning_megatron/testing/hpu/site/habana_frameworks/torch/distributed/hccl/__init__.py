"""HCCL: importing it reads the rank from the environment, chooses a card, and makes the backend known."""

from __future__ import annotations

import os

from simulated_hpu import process_group

_MPI = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
_TOO_FEW = (
    "There is not enough devices\n available for training. Please verify if HABANA_VISIBLE_MODULES\n is set correctly."
)


def initialize_distributed_hpu(
    world_size: int | None = None, rank: int | None = None, local_rank: int | None = None
) -> tuple[int, int, int]:
    """Settle this process' rank and card.

    Args:
        world_size: processes; taken from the environment unless all three are given.
        rank: of this process.
        local_rank: of this process on its machine.

    Returns:
        The three as they are now; 0 processes and ranks of -1 if nothing is known.
    """
    if world_size is not None and rank is not None and local_rank is not None:
        os.environ.update(WORLD_SIZE=str(world_size), RANK=str(rank), LOCAL_RANK=str(local_rank))
    elif all(name in os.environ for name in _MPI):
        size, of_all, of_node = (os.environ[name] for name in _MPI)
        os.environ.update(WORLD_SIZE=size, RANK=of_all, LOCAL_RANK=of_node)
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", "12345")
    found = (
        int(os.environ.get("WORLD_SIZE", 0)),
        int(os.environ.get("RANK", -1)),
        int(os.environ.get("LOCAL_RANK", -1)),
    )
    _choose_card(*found)
    return found


def _choose_card(world_size: int, rank: int, local_rank: int) -> None:
    """One card a process, chosen once: ``HLS_MODULE_ID`` is never written over."""
    if local_rank < 0 or world_size <= 1:
        return
    os.environ["ID"] = str(rank)
    if "HLS_MODULE_ID" in os.environ:
        return
    visible = os.environ.get("HABANA_VISIBLE_MODULES", "0,1,2,3,4,5,6,7").split(",")
    assert local_rank < len(visible), _TOO_FEW
    os.environ["HLS_MODULE_ID"] = visible[local_rank].strip()


initialize_distributed_hpu()
process_group.register()
