"""The folders that a run saves its checkpoints in: their locks, and the checkpoint to resume from."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_megatron import checkpoint
from lightning_megatron.checkpoint.directory.folder_lock import DEAD_AFTER, FolderLock
from lightning_megatron.errors import CheckpointError
from lightning_megatron.lightning.compat._private import checkpoint_folder
from lightning_megatron.lightning.validation.saving import saves_checkpoints

PATIENCE = DEAD_AFTER + 30.0
"""Seconds that a resuming run waits for another to end; by then a run on a lost machine counts as dead."""


class RunFolders:
    """The folders of a Trainer's checkpoint callbacks, while it fits. Only rank 0 uses it."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._locks: dict[Path, FolderLock] = {}

    def _places(self) -> list[tuple[Path, str]]:
        """Folders that ``ModelCheckpoint`` saves in, with the suffix of names there."""
        savers = [saver for saver in self._trainer.checkpoint_callbacks if isinstance(saver, ModelCheckpoint)]
        found = [(checkpoint_folder(saver, self._trainer), saver.FILE_EXTENSION) for saver in savers]
        return list(dict.fromkeys((Path(os.path.abspath(folder)), suffix) for folder, suffix in found))

    @property
    def folders(self) -> list[Path]:
        """Absolute paths of the folders, each once."""
        return list(dict.fromkeys(folder for folder, _ in self._places()))

    def hold(self, patience: float = 0.0) -> None:
        """Lock the folders until :meth:`release`; wait up to ``patience`` seconds for another run to end.

        Raises:
            FolderInUseError: if another run saves there; the text names it.
            OSError: if a folder cannot be written.
        """
        for folder in self.folders if saves_checkpoints(self._trainer) else ():
            if folder not in self._locks:
                lock = FolderLock(folder)
                lock.take(patience, rank_zero_info)
                self._locks[folder] = lock

    def are_held(self) -> bool:
        """True if any run, alive or dead, holds the lock of a folder."""
        return any(FolderLock(folder).is_taken() for folder in self.folders)

    def release(self) -> None:
        """Release the locks."""
        locks, self._locks = self._locks, {}
        for lock in locks.values():
            lock.release()

    def lost(self) -> str:
        """Error text if another run has taken a folder because this process was stopped for long; empty if not."""
        taken = [str(folder) for folder, lock in self._locks.items() if not lock.is_ours()]
        return f"another run has taken {', '.join(taken)}, since this one gave no sign of life" if taken else ""

    def found(self) -> list[checkpoint.Candidate]:
        """Entries of the folders that are named as checkpoints, the newest first."""
        on_exception = [c.ckpt_path for c in self._trainer.callbacks if isinstance(c, OnExceptionCheckpoint)]  # type: ignore[attr-defined]
        return checkpoint.candidates(self._places(), [Path(os.path.abspath(path)) for path in on_exception])

    def last(self) -> Path | None:
        """The newest checkpoint that a run can resume from; ``None`` where no save has ever completed.

        Raises:
            CheckpointError: if there are checkpoints, but a run can resume from none; lists what is wrong with each.
        """
        found = self.found()
        best, _ = checkpoint.newest_good(found)
        if best is not None:
            return best.path
        if lost := [one for one in found if one.state != "interrupted"]:
            raise CheckpointError(nothing_good(lost))
        for one in found:
            rank_zero_warn(f"{one.path} is {one.reason}, and no other was complete: this run starts from scratch")
            one.path.unlink(missing_ok=True)
        return None

    def next_progress(self, before: checkpoint.Progress | None, step: int) -> checkpoint.Progress:
        """Progress of the next save, at this step of a run that was resumed from ``before``, if any."""
        known = [one.progress for one in self.found() if one.progress is not None]
        if before is not None and all(before >= other for other in known):
            return checkpoint.Progress(before.generation, step)
        return checkpoint.Progress(max((other.generation for other in known), default=0) + 1, step)


def nothing_good(found: Sequence[checkpoint.Candidate]) -> str:
    """Error text for folders with checkpoints from which no run can resume."""
    where = ", ".join(dict.fromkeys(str(one.path.parent) for one in found))
    listed = "".join(f"\n  - {one.path}: {one.reason}" for one in found)
    return (
        f'ckpt_path="last": there are checkpoints in {where}, but no run can go on from any of them:{listed}\n'
        "This run does not start from scratch beside them. Give the path of another checkpoint as ckpt_path; or start "
        "from scratch with ckpt_path=None, best in another folder"
    )


def patience(timeout: timedelta, goes_on: bool, variables: Mapping[str, str] = os.environ) -> float:
    """Seconds to wait for another run to end.

    Args:
        timeout: timeout of the other ranks, which wait for rank 0.
        goes_on: True for a run that resumes from the last checkpoint; other runs wait only if they were restarted.
        variables: environment of the process.
    """
    starts = (variables.get(name, "") for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"))
    if goes_on or any(start.isdigit() and int(start) > 0 for start in starts):
        return min(PATIENCE, timeout.total_seconds() / 2)
    return 0.0


def asks_for_last(trainer: Trainer, ckpt_path: object) -> bool:
    """True if a fit resumes from the last checkpoint, if there is one."""
    on_exception = any(isinstance(callback, OnExceptionCheckpoint) for callback in trainer.checkpoint_callbacks)
    return ckpt_path == "last" or (ckpt_path is None and trainer.ckpt_path is None and on_exception)
