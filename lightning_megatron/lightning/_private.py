"""Every private name of Lightning that this package touches, in one place; `tests/trainer/test_private.py` holds it.

Checked on Lightning 2.6.6. Everything else that the package uses of Lightning is public. Of torch, ``optim/`` reads
``Tensor._version``, which the same tests hold, and the store of the default group has no public name.
"""

from collections.abc import Callable, Mapping, Sequence
from inspect import BoundArguments, signature
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ModelSummary
from lightning.pytorch.core.optimizer import _MockOptimizer as MockOptimizer
from lightning.pytorch.strategies.launchers.launcher import _Launcher as Launcher
from lightning.pytorch.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher as SubprocessScriptLauncher,
)

from lightning_megatron.comm.rendezvous import Store

__all__ = [
    "Launcher",
    "MockOptimizer",
    "SubprocessScriptLauncher",
    "asks_for_upload",
    "checkpoint_folder",
    "default_store",
    "injects_samplers",
    "steps_between_saves",
    "summary_options",
    "training_data",
    "with_other_path",
]


def injects_samplers(module: LightningModule | None) -> bool:
    """True if the Trainer of a module may replace samplers: its ``use_distributed_sampler``."""
    return module is not None and module.trainer._accelerator_connector.use_distributed_sampler


def steps_between_saves(callback: ModelCheckpoint) -> int:
    """The ``every_n_train_steps`` that it was given; 0 for none."""
    return callback._every_n_train_steps


def checkpoint_folder(callback: ModelCheckpoint, trainer: Trainer) -> str:
    """The folder that it saves in: its ``dirpath``, or what the Trainer's logger gives."""
    return str(callback._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[attr-defined]


def with_other_path(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], change: Callable[[Any], Any]
) -> BoundArguments:
    """The arguments of what ``fit`` launches, with the path of its checkpoint changed."""
    bound = signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    bound.arguments["ckpt_path"] = change(bound.arguments["ckpt_path"])
    return bound


def training_data(trainer: Trainer) -> Any:
    """The training data that ``fit`` was given: loaders, or the module or data module that makes them."""
    return trainer.fit_loop._data_source.instance


def asks_for_upload(logger: Any) -> bool:
    """True if a logger was made with ``log_model=True`` or ``"all"``; several of Lightning's keep it under one name."""
    return getattr(logger, "_log_model", False) in (True, "all")


def summary_options(callback: ModelSummary) -> tuple[int, dict[str, Any]]:
    """The settings of a model summary: its depth, and arguments of ``summarize``."""
    return callback._max_depth, callback._summarize_kwargs


def default_store() -> Store:
    """The store at which the ranks of the default process group have met."""
    store: Store = dist.distributed_c10d._get_default_store()
    return store
