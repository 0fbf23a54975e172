"""Missing checkpoints: a path that does not exist, and ``ckpt_path="last"`` in a folder that is new."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn

from lightning_megatron.checkpoint.select.newest import absent
from lightning_megatron.errors import MissingCheckpointError

NAMED = ("last", "best", "hpc", "registry")
"""Words that Lightning takes as ``ckpt_path`` beside paths."""


def refuse_missing(objects: Sequence[object]) -> None:
    """Raise ``MissingCheckpointError`` if nothing is at the path of a checkpoint among the arguments of a run."""
    for path in (Path(item) for item in objects if isinstance(item, str | os.PathLike)):
        if str(path).partition(":")[0] not in NAMED and not path.exists():
            raise MissingCheckpointError(f"loading {path}: {absent(path)}")


def warn_of_new_folder(trainer: Trainer) -> bool:
    """Warn, and return True, if ``ckpt_path="last"`` looks in a folder that each run creates: none would resume.

    Without a ``dirpath``, ``ModelCheckpoint`` saves, and Lightning looks, in the logger's folder, and most loggers make
    a new one for each run.
    """
    savers = [saver for saver in trainer.checkpoint_callbacks if isinstance(saver, ModelCheckpoint)]
    logger = trainer.logger
    if not savers or logger is None or any(saver.dirpath is not None for saver in savers):
        return False
    runs = Path(logger.save_dir or trainer.default_root_dir) / str(logger.name or "")
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    if (runs / version / "checkpoints").exists():
        return False
    found = sorted(runs.glob("*/checkpoints/last*.ckpt"), key=lambda path: path.lstat().st_mtime)
    newest = f" The newest one of earlier runs is {found[-1]}." if found else ""
    rank_zero_warn(
        f'ckpt_path="last" looks in {runs / version / "checkpoints"}, which is new, so this run starts from scratch: '
        f"give ModelCheckpoint a dirpath that stays, and save_last='link'.{newest}"
    )
    return True
