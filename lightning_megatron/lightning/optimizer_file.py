"""The state of a run's optimizers in one file, whatever the layout: for other programs, or to begin another run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from lightning_megatron.checkpoint import State
from lightning_megatron.checkpoint.collect import HostMemory, export_state, import_state
from lightning_megatron.lightning.checkpoints import continue_optimizer, optimizer_part
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.optim.zero import ShardedOptimizer


def export_optimizers(
    path: str | os.PathLike[str],
    optimizers: Sequence[ShardedOptimizer],
    mesh: ParallelMesh,
    *,
    sharded: bool,
    level: str,
    ranks_per_node: int,
) -> HostMemory:
    """Write main values, per-element state, steps and groups; all ranks call this.

    Args:
        path: the file.
        optimizers: the distributed optimizers.
        mesh: this rank's.
        sharded: whether data-parallel ranks hold different shares.
        level: see ``checkpoint.levels.MEMORY_LEVELS``.
        ranks_per_node: processes on a node.
    """
    state, experts = _state(optimizers, mesh, sharded)
    for key, value in state.items():
        if key.endswith(".param_groups"):  # stages tell their names in the order of the pipeline
            state[key] = [{**group, "params": sorted(group["params"])} for group in value]
    return export_state(path, state, experts, mesh, level=level, ranks_per_node=ranks_per_node)


def import_optimizers(
    path: str | os.PathLike[str],
    optimizers: Sequence[ShardedOptimizer],
    mesh: ParallelMesh,
    *,
    sharded: bool,
    level: str,
    ranks_per_node: int,
) -> HostMemory:
    """Fill optimizers from such a file, and parameters from their main values; all ranks call this."""
    for optimizer in optimizers:
        optimizer.finish_param_gather()
    state, experts = _state(optimizers, mesh, sharded)
    memory = import_state(path, state, experts, mesh, level=level, ranks_per_node=ranks_per_node)
    for index, optimizer in enumerate(optimizers):
        continue_optimizer(index, optimizer, state)
    return memory


def _state(optimizers: Sequence[ShardedOptimizer], mesh: ParallelMesh, sharded: bool) -> tuple[State, set[str]]:
    """The state by key, and which keys are of experts."""
    state: State = {}
    experts: set[str] = set()
    for index, optimizer in enumerate(optimizers):
        optimizer.init_state()
        part: dict[str, Any] = optimizer_part(index, optimizer, mesh, sharded)
        names = {piece.name for piece, *_ in optimizer.pieces() if piece.spec.is_expert}
        prefix = f"optimizer_{index}.state."
        experts |= {key for key in part if key.removeprefix(prefix).rpartition(".")[0] in names}
        state |= part
    return state, experts
