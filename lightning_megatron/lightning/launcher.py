"""Starting the processes of a job, once nothing is left to complain about."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Trainer

from lightning_megatron import device as devices
from lightning_megatron.config import Problem, raise_if_any
from lightning_megatron.lightning._private import SubprocessScriptLauncher
from lightning_megatron.lightning.last_checkpoint import warn_of_new_folder
from lightning_megatron.lightning.signals import handed_on


class CheckedLauncher(SubprocessScriptLauncher):
    """Lightning's launcher, which asks for a check of the whole configuration before it spawns anything.

    Args:
        cluster_environment: Lightning's.
        num_processes: processes on this node.
        num_nodes: nodes of the job.
        device: of this process.
        check: called with everything handed to ``trainer.fit`` (module, loaders, data module); raises to stop.

    Raises:
        ConfigError: where somebody else has started processes that Lightning does not see.
    """

    def __init__(
        self,
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        device: torch.device,
        check: Callable[..., None],
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        raise_if_any(launch_problems(cluster_environment))
        self._device, self._check = device, check

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Check, spawn, run ``function``."""
        self._check(*args, *kwargs.values(), trainer=trainer)
        warn_of_new_folder([*args, *kwargs.values()], trainer)
        devices.drop_card(self._device)
        if self.num_processes == 1 and self.num_nodes == 1:
            return function(*args, **kwargs)  # nothing to spawn: no variables are set, no thread watches for children
        with handed_on(self.kill):
            return super().launch(function, *args, trainer=trainer, **kwargs)


def launch_problems(environment: ClusterEnvironment | None, variables: Mapping[str, str] = os.environ) -> list[Problem]:
    """Ranks that somebody else has started and Lightning does not see: each would start a whole job of its own.

    Args:
        environment: what Lightning has chosen.
        variables: of the process.
    """
    if not isinstance(environment, LightningEnvironment) or environment.creates_processes_externally:
        return []
    torchrun = "torchrun --nnodes=NODES --nproc-per-node=DEVICES --node-rank=NODE --master-addr=HOST script.py"
    for name in ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE"):
        if int(variables.get(name) or 1) > 1:
            reason = (
                "MPI has started these processes, but without mpi4py Lightning takes each for a job of its own: "
                f"pip install mpi4py, or start one process a node and in it `{torchrun}`"
            )
            return [Problem(name, variables[name], reason)]
    if "RANK" in variables and int(variables.get("WORLD_SIZE") or 1) > 1:
        reason = (
            "somebody (a PyTorchJob?) has given this process a RANK but no LOCAL_RANK, and Lightning takes it for a "
            f"job of its own: start `{torchrun}` in it, with NODES=$WORLD_SIZE, NODE=$RANK and HOST=$MASTER_ADDR, or, "
            "with one device a process, give the Trainer plugins=[KubeflowEnvironment()] and num_nodes=WORLD_SIZE"
        )
        return [Problem("RANK", variables["RANK"], reason)]
    return []
