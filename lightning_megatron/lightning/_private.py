"""Every private name of Lightning that this package touches, in one place; `tests/trainer/test_private.py` holds it.

Checked on Lightning 2.6.6. Everything else that the package uses of Lightning is public. Of torch, ``optim/`` reads
``Tensor._version``, which the same tests hold.
"""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ModelSummary
from lightning.pytorch.core.optimizer import _MockOptimizer as MockOptimizer
from lightning.pytorch.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher as SubprocessScriptLauncher,
)

__all__ = [
    "MockOptimizer",
    "SubprocessScriptLauncher",
    "asks_for_upload",
    "injects_samplers",
    "steps_between_saves",
    "summary_options",
    "training_data",
]


def injects_samplers(module: LightningModule | None) -> bool:
    """True if the Trainer of a module may replace samplers: its ``use_distributed_sampler``."""
    return module is not None and module.trainer._accelerator_connector.use_distributed_sampler


def steps_between_saves(callback: ModelCheckpoint) -> int:
    """The ``every_n_train_steps`` that it was given; 0 for none."""
    return callback._every_n_train_steps


def training_data(trainer: Trainer) -> Any:
    """The training data that ``fit`` was given: loaders, or the module or data module that makes them."""
    return trainer.fit_loop._data_source.instance


def asks_for_upload(logger: Any) -> bool:
    """True if a logger was made with ``log_model=True`` or ``"all"``; several of Lightning's keep it under one name."""
    return getattr(logger, "_log_model", False) in (True, "all")


def summary_options(callback: ModelSummary) -> tuple[int, dict[str, Any]]:
    """The settings of a model summary: its depth, and arguments of ``summarize``."""
    return callback._max_depth, callback._summarize_kwargs
