"""Lightning's Trainer inside the workers of a pool, where processes and their group exist already."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch import Trainer
from lightning.pytorch.loggers.logger import Logger

from lightning_megatron import device as devices
from lightning_megatron.lightning.environments.given_ranks import GivenRanks
from lightning_megatron.lightning.strategy.megatron import MegatronStrategy
from lightning_megatron.testing import one_card


class PoolEnvironment(GivenRanks):
    """Environment with the ranks of the existing process group; without a group, there is one rank."""

    def world_size(self) -> int:
        """Number of ranks of the group."""
        return dist.get_world_size() if dist.is_initialized() else 1

    def global_rank(self) -> int:
        """Rank in the group."""
        return dist.get_rank() if dist.is_initialized() else 0

    def local_rank(self) -> int:
        """Rank on the node: all workers are on one node, or each on one of its own."""
        return 0 if one_card.enabled() else self.global_rank()

    def node_rank(self) -> int:
        """Number of the node: all workers are on one node, or each on one of its own."""
        return self.global_rank() if one_card.enabled() else 0


class Recorder(Logger):
    """Logger that keeps the metrics of a run as plain numbers, on every rank.

    It is not a callback, since an unknown callback would turn off the overlapped parameter gather.

    Attributes:
        rows: metrics of each call, with the ``step``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    @property
    def name(self) -> str:
        """For Lightning."""
        return "recorder"

    @property
    def version(self) -> int:
        """For Lightning."""
        return 0

    @property
    @rank_zero_experiment
    def experiment(self) -> None:
        """No experiment object."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append the metrics as a row."""
        self.rows.append({"step": float(step or 0), **{name: float(value) for name, value in metrics.items()}})

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Ignore hyperparameters."""

    def series(self, name: str) -> list[float]:
        """All values logged under a name, in order."""
        return [row[name] for row in self.rows if name in row]


def kind_in_tests() -> devices.DeviceKind:
    """Kind of device of our strategy in tests; Lightning's strategies stay on the CPU."""
    if one_card.enabled():
        return devices.CUDA
    return devices.HPU if devices.hpu_available() else devices.CPU


def quiet_trainer(strategy: Any = "auto", **options: Any) -> Trainer:
    """Create a Trainer for all ranks of the process group that prints nothing, and logs every step to ``logger``.

    It trains on the CPU; or, with our strategy, on a Gaudi if there is one, or on the card that all ranks share.
    Lightning's strategies are the reference of comparisons, and stay on the CPU.

    Args:
        strategy: strategy of the Trainer.
        **options: further arguments of the Trainer; they replace the quiet ones, and ``plugins`` are added.
    """
    environment = PoolEnvironment()
    plugins = [environment, *options.pop("plugins", ())]
    kind = kind_in_tests() if isinstance(strategy, MegatronStrategy) else devices.CPU
    quiet: dict[str, Any] = {
        "accelerator": kind.type,
        "devices": environment.world_size(),
        "plugins": plugins,
        "default_root_dir": tempfile.gettempdir(),
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
    }
    chosen = quiet | options
    if one_card.enabled():
        chosen |= {"devices": 1, "num_nodes": chosen["devices"]}
    return Trainer(strategy=strategy, **chosen)
