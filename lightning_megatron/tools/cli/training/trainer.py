"""``lightning-megatron fit | validate | test | predict``: LightningCLI with this package's classes known by name."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NoReturn

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser

import lightning_megatron  # noqa: F401 - registers the strategy, and makes modules known by their short names
from lightning_megatron.checkpoint import CheckpointError
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.data import DataError
from lightning_megatron.errors import ConfigError
from lightning_megatron.tools.cli.common import fail
from lightning_megatron.tools.cli.training.checkpoint_cli import CheckpointCLI

_WHERE = """The layout (tp, pp, cp, ep) is the strategy's: --trainer.strategy.tp 2, and
--trainer.strategy.help MegatronStrategy for all of it. Fields of the model's
configuration: --model.dict_kwargs.num_layers 4."""


class BriefParser(LightningArgumentParser):
    """LightningCLI's parser with errors of two lines: the fault, and the command for help."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Report an error; if it names a field of the model's configuration, say how to give that field."""
        name = re.search(r"NestedArg\(key='(\w+)'", message)
        if name is not None and name[1] in {field.name for field in fields(TransformerConfig)}:
            message = f"{name[1]} is a field of the model's configuration: write --model.dict_kwargs.{name[1]}"
        super().error(message, ex)

    def print_usage(self, file: Any = None) -> None:
        """Print nothing: the parser calls this before each error, and the usage has fifty lines."""


def trainer_command(argv: Sequence[str] | None) -> int:
    """Run LightningCLI; any LightningModule and LightningDataModule may be named.

    Args:
        argv: the command and its words; ``None`` for those of this process, with which Lightning starts the other
            processes of a job.

    Returns:
        The exit status: 0, or 2 where the configuration or the data is at fault.
    """
    if rank_zero_only.rank:  # type: ignore[attr-defined]  # all ranks say "Seed set to ..."
        logging.getLogger("lightning.fabric.utilities.seed").setLevel(logging.WARNING)
    try:
        CheckpointCLI(
            LightningModule,
            LightningDataModule,
            parser_class=BriefParser,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_kwargs={"overwrite": True},
            trainer_defaults={"strategy": {"class_path": "lightning_megatron.MegatronStrategy"}},
            parser_kwargs={name: {"description": _WHERE} for name in ("fit", "validate", "test", "predict")},
            # Without a number Lightning warns that it takes 0.
            seed_everything_default=True if "PL_GLOBAL_SEED" in os.environ else 0,
            args=None if argv is None else list(argv),
        )
    except Exception as error:
        fault = _users_fault(error)
        if fault is None:
            raise
        return fail(fault) if getattr(error, "is_printed_here", True) else 2  # else another rank prints it
    return 0


def _users_fault(error: BaseException | None) -> Exception | None:
    """This error or the first of its causes that is one of ours; its text is all that a user needs."""
    while error is not None and not isinstance(error, ConfigError | DataError | CheckpointError):
        error = error.__cause__  # the parser wraps what a class raises while it is built
    return error
