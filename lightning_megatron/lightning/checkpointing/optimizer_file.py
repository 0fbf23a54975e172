"""Optimizer state in one file that does not depend on the layout, for other programs or to start another run."""

from __future__ import annotations

import os
from collections.abc import Sequence

from lightning_megatron.checkpoint import State, refuse_nonfinite
from lightning_megatron.checkpoint.optimizer_export.export import Collectors, HostMemory, export_state, import_state
from lightning_megatron.checkpoint.tensors.keys import Key, groups_key, is_groups, optimizer_family
from lightning_megatron.comm.all_ranks import on_all_ranks
from lightning_megatron.errors import Problem, raise_if_any
from lightning_megatron.lightning.checkpointing.trainer_state import (
    begin_optimizer,
    complete_state,
    continue_optimizer,
    optimizer_part,
)
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.optim.zero import ShardedOptimizer


def export_optimizers(
    path: str | os.PathLike[str],
    optimizers: Sequence[ShardedOptimizer],
    through: Collectors,
    *,
    sharded: bool,
) -> HostMemory:
    """Write main values, groups, and per-element state and steps where they exist; all ranks call this."""
    _refuse_whole(optimizers)
    complete_state(optimizers, through.mesh)
    state, experts = _state(optimizers, through.mesh, sharded)
    for key, value in state.items():
        if is_groups(key):  # else names would be ordered by pipeline stage
            state[key] = [{**group, "params": sorted(group["params"])} for group in value]
    memory = export_state(path, state, experts, through)
    for optimizer in optimizers:
        optimizer.drop_initial_state()
    return memory


def import_optimizers(
    path: str | os.PathLike[str],
    optimizers: Sequence[ShardedOptimizer],
    through: Collectors,
    *,
    sharded: bool,
) -> HostMemory:
    """Fill optimizers from such a file and drop state that it lacks, and refresh parameters; all ranks call this."""
    _refuse_whole(optimizers)
    groups: State = {groups_key(index): None for index in range(len(optimizers))}
    import_state(path, groups, (), through)
    alike = {optimizer_family(i) for i, optimizer in enumerate(optimizers) if optimizer.is_like(groups[groups_key(i)])}
    for index, optimizer in enumerate(optimizers):
        optimizer.finish_param_gather()
        begin_optimizer(optimizer, groups[groups_key(index)])
    state, experts = _state(optimizers, through.mesh, sharded)
    asked = set(state)
    memory = import_state(path, state, experts, through, alike)
    on_all_ranks(through.mesh, f"loading {path}", lambda: refuse_nonfinite(state, ()))
    for index, optimizer in enumerate(optimizers):
        continue_optimizer(index, optimizer, state, asked - state.keys())
    return memory


def _refuse_whole(optimizers: Sequence[ShardedOptimizer]) -> None:
    reason = "only element-wise optimizers, whose state has the shape of parameters, go to one file: save a checkpoint"
    kinds = [type(optimizer.optimizer).__name__ for optimizer in optimizers if not optimizer.is_flat]
    raise_if_any([Problem("optimizer", kind, reason) for kind in kinds])


def _state(optimizers: Sequence[ShardedOptimizer], mesh: ParallelMesh, sharded: bool) -> tuple[State, set[str]]:
    """The state by key, and the keys of experts."""
    state: State = {}
    experts: set[str] = set()
    for index, optimizer in enumerate(optimizers):
        part = optimizer_part(index, optimizer, mesh, sharded)
        names = {shard.name for shard in optimizer.param_shards() if shard.spec.is_expert}
        experts |= {key for key in part if (parsed := Key.parse(key)).state and parsed.name in names}
        state |= part
    return state, experts
