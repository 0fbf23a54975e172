"""Checks that the ranks of a launcher match the Trainer's devices and nodes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from lightning_megatron.errors import Problem
from lightning_megatron.lightning.environments.mpi import MpirunEnvironment

_TASKS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")


def rank_problems(
    environment: ClusterEnvironment | None,
    nodes: int,
    devices_per_node: int,
    variables: Mapping[str, str] = os.environ,
) -> list[Problem]:
    """Faults of ranks that another program has started."""
    if environment is None or not environment.creates_processes_externally:
        return []
    world, rank = environment.world_size(), environment.global_rank()
    name = type(environment).__name__.removesuffix("Environment")
    if isinstance(environment, LightningEnvironment) and dist.is_initialized():
        world = dist.get_world_size()  # processes of an earlier Trainer in this script
    rule = "devices is the number of processes on each machine, num_nodes that of machines"
    if world != nodes * devices_per_node:
        reason = f"with num_nodes={nodes} that makes {nodes * devices_per_node} ranks, but {name} has started {world}"
        fitting = (world // nodes,) if world % nodes == 0 else ()
        return [Problem("devices", devices_per_node, f"{reason}: {rule}", fitting)]
    on_machines = _ranks_on_machines(environment, variables)
    if on_machines - {devices_per_node}:  # all ranks find this, so none waits for another
        told = " or ".join(map(str, sorted(on_machines)))
        return [Problem("devices", devices_per_node, f"{name} has started {told} on a machine: {rule}")]
    expected = environment.node_rank() * devices_per_node + environment.local_rank()
    if rank != expected:
        reason = (
            f"{name} runs it as process {environment.local_rank()} of machine {environment.node_rank()}: ranks must be "
            "numbered machine by machine (mpirun --map-by slot, srun --distribution=block)"
        )
        return [Problem("rank", rank, reason, (expected,))]
    return []


def _ranks_on_machines(environment: ClusterEnvironment, variables: Mapping[str, str]) -> set[int]:
    """All numbers of ranks that a machine has, as far as the launcher tells."""
    if isinstance(environment, MpirunEnvironment):
        return {environment.ranks.local_size}
    if isinstance(environment, TorchElasticEnvironment):
        given = variables.get("LOCAL_WORLD_SIZE", "")
        return {int(given)} if given.isdigit() else set()
    if isinstance(environment, SLURMEnvironment):
        tasks = next((variables[name] for name in _TASKS if variables.get(name)), "")
        return {int(count) for count in re.findall(r"(\d+)(?:\(x\d+\))?(?:,|$)", tasks)}
    return set()
