"""Leftovers of dead runs in a folder of checkpoints: restored where they are complete, and cleared otherwise.

Only work of a dead owner is touched. An owner that this process can look up is dead if its process has ended; an owner
on another machine or in another container, if nothing has been written for an hour.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lightning_megatron.checkpoint.directory.atomic_dir import UNFINISHED, Unfinished, delete, tidy, unfinished_of
from lightning_megatron.checkpoint.directory.owner import Owner

DEAD_AFTER = 3600.0
"""Seconds without a write after which unfinished work counts as abandoned: ranks wait for each other for minutes."""


def recover(path: Path) -> None:
    """Restore a checkpoint that a crash left renamed while it was being replaced."""
    for entry, name in unfinished_of(path):
        is_others = name.owner is not None and name.owner != Owner.own() and name.owner.is_alive
        if name.kind == "replaced" and not is_others and not os.path.lexists(path):
            os.rename(entry, path)


def remove_stale(folder: Path, dead_after: float = DEAD_AFTER) -> list[str]:
    """Clear the leftovers of dead runs in a folder of checkpoints. Call it on one rank.

    A checkpoint that a crash left renamed while it was being replaced gets its name back, if that is free.

    Args:
        folder: folder of checkpoints.
        dead_after: seconds without a write, by the clock of the file system, after which work counts as abandoned; it
            applies to work of this process, and of processes that cannot be looked up.

    Returns:
        Names of the entries that were cleared or restored.
    """
    unfinished = folder / UNFINISHED
    if not unfinished.is_dir():
        return []
    try:
        now = file_system_time(unfinished)
        entries = sorted(unfinished.iterdir())
    except FileNotFoundError:  # another writer has just removed the empty folder
        return []
    cleared = []
    for entry in entries:
        with suppress(OSError):  # its owner has just finished, or is alive after all
            name = Unfinished.parse(entry)
            if name is None or not _is_nobodys(entry, name.owner, now, dead_after):
                continue
            if name.kind == "replaced" and not os.path.lexists(name.path):
                os.rename(entry, name.path)
            else:
                delete(entry)
            cleared.append(entry.name)
    tidy(unfinished)
    return cleared


def file_system_time(folder: Path) -> float:
    """The time by the clock of a folder's file system."""
    with tempfile.TemporaryFile(dir=folder) as stream:
        return os.fstat(stream.fileno()).st_mtime


def _is_nobodys(entry: Path, owner: Owner | None, now: float, dead_after: float) -> bool:
    if owner is not None and owner != Owner.own() and (is_alive := owner.is_alive) is not None:
        return not is_alive
    # A time far in the future does not count either: a clock was wrong.
    return abs(now - _last_sign_of_life(entry)) > dead_after


def _last_sign_of_life(entry: Path) -> float:
    def times() -> Iterator[float]:
        status = entry.lstat()
        yield max(status.st_mtime, status.st_ctime)  # a rename changes the latter
        if entry.is_dir() and not entry.is_symlink():
            yield from (child.lstat().st_mtime for child in entry.iterdir())

    return max(times())
