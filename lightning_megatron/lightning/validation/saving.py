"""Faults of the first save, which may be hours away, found before training."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.parsing import is_picklable

from lightning_megatron.errors import Problem
from lightning_megatron.lightning.compat._private import asks_for_upload


def saving_problems(objects: Sequence[object], trainer: Trainer | None, *, one_file: bool) -> list[Problem]:
    """Addresses, hyper-parameters, callbacks and loggers with which saving cannot work."""
    found = [p for item in objects if isinstance(item, str | os.PathLike) for p in address_problems("ckpt_path", item)]
    if trainer is None:
        return found
    found += trainer_address_problems(trainer)
    if trainer.state.fn != TrainerFn.FITTING or not saves_checkpoints(trainer):
        return found
    for item in objects:
        if isinstance(item, LightningModule | LightningDataModule):
            found += hyper_parameter_problems(item)
    found += callback_state_problems(trainer)
    if one_file:
        return found
    return found + [upload_problem(logger) for logger in trainer.loggers if asks_for_upload(logger)]


def saves_checkpoints(trainer: Trainer) -> bool:
    """True if the Trainer saves checkpoints."""
    return bool(trainer.checkpoint_callbacks) and not trainer.fast_dev_run  # type: ignore[attr-defined]


# Addresses


def address_problems(argument: str, path: Any) -> list[Problem]:
    """The problem of a path that is an address of fsspec, such as ``s3://bucket/run``; none for any other."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else str(path)
    # A Path turns two slashes into one; a single letter before the colon is a drive.
    match = re.match(r"([A-Za-z][A-Za-z0-9+.:-]+):/", text)
    if match is None:
        return []
    reason = "checkpoints are directories of a file system that all ranks see: save there, and copy them afterwards"
    local = text.removeprefix("file:")
    return [Problem(argument, text, reason, ("/" + local.lstrip("/"),) if local != text else ())]


def trainer_address_problems(trainer: Trainer) -> list[Problem]:
    """The problems of the folders that the Trainer saves in, if they are addresses."""
    found = address_problems("default_root_dir", trainer.default_root_dir)
    follows_logger = False
    for callback in trainer.checkpoint_callbacks:
        folder = getattr(callback, "dirpath", None)
        if folder is not None:
            found += address_problems(f"{type(callback).__name__}(dirpath=...)", folder)
        follows_logger |= folder is None and isinstance(callback, ModelCheckpoint)
    if follows_logger and trainer.loggers and trainer.loggers[0].save_dir is not None:
        argument = f"{type(trainer.loggers[0]).__name__}.save_dir, where ModelCheckpoint without dirpath saves"
        found += address_problems(argument, trainer.loggers[0].save_dir)
    return found


# What a checkpoint cannot hold


def hyper_parameter_problems(owner: LightningModule | LightningDataModule) -> list[Problem]:
    """Hyper-parameters without a plain form. Lightning leaves out, with a warning, those that cannot be pickled."""
    kept = {name: value for name, value in owner.hparams.items() if is_picklable(value)}
    found = []
    for where, kind in _faults(kept):
        name = re.split(r"[.\[]", where, maxsplit=1)[0]
        reason = (
            f"a checkpoint holds primitives, containers and tensors, and no {kind}, so that loading it runs no code: "
            f"call save_hyperparameters(ignore=[{name!r}]), or pass something plain"
        )
        found.append(Problem(f"{type(owner).__name__}.hparams", where, reason))
    return found


def callback_state_problems(trainer: Trainer) -> list[Problem]:
    """States of callbacks without a plain form, as far as they exist at the start."""
    found = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        try:
            state = callback.state_dict()
        except Exception:  # it may need attributes that only setup makes
            continue
        for where, kind in _faults(state):
            reason = f"a checkpoint holds primitives, containers and tensors, and no {kind}: return something plain"
            found.append(Problem(f"{type(callback).__name__}.state_dict()", where, reason))
    return found


def _faults(value: Mapping[str, Any] | None) -> Iterable[tuple[str, str]]:
    if not value:  # a state may be None, which is not saved
        return
    from lightning_megatron.checkpoint.formats.meta import objects_in
    from lightning_megatron.checkpoint.formats.plain import plain

    for text in objects_in(plain(dict(value))):
        where, _, kind = text.partition(": ")
        yield where, kind


# Loggers


def upload_problem(logger: object) -> Problem:
    """A logger that uploads files, where checkpoints are directories."""
    reason = (
        "it uploads single files, and checkpoints are directories: leave log_model out, and add the callback "
        "UploadCheckpoints(); or save single files, with MegatronStrategy(save_distributed_checkpoint=False)"
    )
    return Problem(f"{type(logger).__name__}(log_model=...)", True, reason, (False,))
