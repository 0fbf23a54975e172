"""How a directory comes to have its final name, and loses it: at once or not at all.

Work in progress lies in a hidden folder beside the checkpoint, because Lightning takes what it finds in the folder
itself for checkpoints by parts of the name (``last*.ckpt``, any ``hpc_ckpt_N``).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

UNFINISHED = ".unfinished"

DEAD_AFTER = 3600.0
"""Seconds without a sign of life after which unfinished work is nobody's: ranks wait for each other for minutes."""

_ATTEMPTS = 100
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_KINDS = (".saving", ".replaced", ".removing", ".linking")


def saving_path(path: Path) -> Path:
    """Where ``path`` is written before it is complete."""
    return path.parent / UNFINISHED / f"{path.name}.saving"


def _replaced_path(path: Path) -> Path:
    return path.parent / UNFINISHED / f"{path.name}.replaced"


def prepare(path: Path) -> Path:
    """An empty directory to write ``path`` into; clears what an interrupted save of the same name left."""
    recover(path)
    temporary = saving_path(path)
    for stale in (temporary, _replaced_path(path)):
        _delete(stale)
    _among_unfinished(temporary, temporary.mkdir)
    return temporary


def _among_unfinished(entry: Path, make: Callable[[], object]) -> None:
    """Make an entry of the folder of unfinished work, which who finishes something tidies away whenever it is empty.

    That may be another thread (saves in the background) or another run, and just between the two steps here.
    """
    for attempt in range(_ATTEMPTS):
        entry.parent.mkdir(parents=True, exist_ok=True)
        try:
            make()
        except FileNotFoundError:
            if attempt == _ATTEMPTS - 1:
                raise
        else:
            return


def discard(path: Path) -> None:
    """Drop what :func:`prepare` made: the save failed."""
    with suppress(OSError):
        _delete(saving_path(path))
    _tidy(path)


def publish(path: Path) -> None:
    """Give what :func:`prepare` made its final name, in place of what has it now.

    Where the system can exchange two names there is no moment without a complete checkpoint under ``path``. Elsewhere
    the old one steps aside first, and :func:`recover` brings it back after a crash between the two renames.
    """
    temporary, replaced = saving_path(path), _replaced_path(path)
    sync_directory(temporary)
    if not os.path.lexists(path):
        os.rename(temporary, path)
    elif exchange(temporary, path):
        os.rename(temporary, replaced)
    else:
        os.rename(path, replaced)
        os.rename(temporary, path)
    sync_directory(path.parent)
    _delete(replaced)
    _tidy(path)


def recover(path: Path) -> None:
    """Bring back a checkpoint that a crash left aside while it was being replaced."""
    replaced = _replaced_path(path)
    if os.path.lexists(replaced) and not os.path.lexists(path):
        os.rename(replaced, path)


def remove(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint (a directory, a file or a link); nothing happens if there is none.

    It loses its name first: a half-deleted directory never looks like a checkpoint. Call it on one rank.
    """
    path = Path(path)
    if path.is_dir() and not path.is_symlink():
        going = path.parent / UNFINISHED / f"{path.name}.removing"
        _delete(going)
        _among_unfinished(going, lambda: os.rename(path, going))
        sync_directory(path.parent)
        _delete(going)
        _tidy(path)
    else:
        path.unlink(missing_ok=True)


def links_in(folder: Path) -> dict[Path, str]:
    """The symbolic links of a folder, and what is written in them."""
    if not folder.is_dir():
        return {}
    return {entry: os.readlink(entry) for entry in folder.iterdir() if entry.is_symlink()}


def link_end(link: Path, target: str) -> Path:
    """Where a link leads in which ``target`` is written."""
    return Path(os.path.abspath(link.parent / target))


def remove_unlinked(paths: Iterable[Path]) -> list[Path]:
    """Remove checkpoints to which no link beside them leads; the others, absolute paths all, are returned."""
    waiting = []
    for path in sorted(paths, key=lambda path: not path.is_symlink()):  # links first
        if path in {link_end(link, target) for link, target in links_in(path.parent).items()}:
            waiting.append(path)
        else:
            remove(path)
    return waiting


def lead(link: Path, target: str | None) -> None:
    """Let a link lead elsewhere, in one step; ``None`` removes it."""
    if target is None:
        link.unlink(missing_ok=True)
        return
    other = link.parent / UNFINISHED / f"{link.name}.linking"
    _delete(other)
    _among_unfinished(other, lambda: os.symlink(target, other))
    os.replace(other, link)
    sync_directory(link.parent)
    _tidy(link)


def sweep(folder: Path, dead_after: float = DEAD_AFTER) -> list[str]:
    """Clear what runs that died have left in a folder of checkpoints. Call it on one rank.

    Another run may be saving there at this moment, so only what nothing has been written to for ``dead_after`` seconds
    goes, by the clock of the file system. A checkpoint that was left aside while it was being replaced gets its name
    back, if nothing else has it.

    Returns:
        Names of what was cleared or brought back.
    """
    unfinished = folder / UNFINISHED
    if not unfinished.is_dir():
        return []
    try:
        with tempfile.TemporaryFile(dir=unfinished) as stream:
            now = os.fstat(stream.fileno()).st_mtime
        entries = sorted(unfinished.iterdir())
    except FileNotFoundError:  # whoever has finished something has just tidied it away
        return []
    cleared = []
    for entry in entries:
        with suppress(OSError):  # its owner has just finished, or is alive after all
            if entry.suffix in _KINDS and now - _last_sign_of_life(entry) > dead_after:
                path = folder / entry.stem
                if entry.suffix == ".replaced" and not os.path.lexists(path):
                    os.rename(entry, path)
                else:
                    _delete(entry)
                cleared.append(entry.name)
    _tidy(folder / "any")
    return cleared


def _last_sign_of_life(entry: Path) -> float:
    def times() -> Iterator[float]:
        status = entry.lstat()
        yield max(status.st_mtime, status.st_ctime)  # a rename leaves its mark in the latter
        if entry.is_dir() and not entry.is_symlink():
            yield from (child.lstat().st_mtime for child in entry.iterdir())

    return max(times())


def exchange(a: Path, b: Path) -> bool:
    """Exchange two names in one step; ``False`` where the system or the file system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    return rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0


def sync_file(file: Path) -> None:
    """Wait until a file is on the disk."""
    _sync(file, os.O_RDONLY)


def sync_directory(directory: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    if os.name == "posix":
        _sync(directory, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _tidy(path: Path) -> None:
    with suppress(OSError):  # something else is in progress there
        (path.parent / UNFINISHED).rmdir()
