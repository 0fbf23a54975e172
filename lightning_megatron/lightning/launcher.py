"""Starting the processes of a job, once nothing is left to complain about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import Trainer

from lightning_megatron import device as devices
from lightning_megatron.lightning._private import SubprocessScriptLauncher


class CheckedLauncher(SubprocessScriptLauncher):
    """Lightning's launcher, which asks for a check of the whole configuration before it spawns anything.

    Args:
        cluster_environment: Lightning's.
        num_processes: processes on this node.
        num_nodes: nodes of the job.
        device: of this process.
        check: called with everything handed to ``trainer.fit`` (module, loaders, data module); raises to stop.
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
        self._device, self._check = device, check

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Check, spawn, run ``function``."""
        self._check(*args, *kwargs.values(), trainer=trainer)
        devices.drop_card(self._device)
        if self.num_processes == 1 and self.num_nodes == 1:
            return function(*args, **kwargs)  # nothing to spawn: no variables are set, no thread watches for children
        return super().launch(function, *args, trainer=trainer, **kwargs)
