"""Directories that get and lose their final names atomically.

Unfinished work lies in a hidden folder beside the checkpoint, because Lightning recognizes checkpoints by parts of the
names in the folder itself (``last*.ckpt``, any ``hpc_ckpt_N``). Each entry there has a unique name, which identifies
the process that it belongs to: no other process writes into, publishes or clears it.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from lightning_megatron.checkpoint.directory.owner import Owner
from lightning_megatron.files.durable import sync_directory

UNFINISHED = ".unfinished"

_ATTEMPTS = 100
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2

Kind = Literal["saving", "replaced", "removing", "linking"]
_UNFINISHED = re.compile(r"(.+?)(?:\.([0-9a-f]+(?:-[0-9a-f]+){3}))?\.(saving|replaced|removing|linking)")


class Unfinished(NamedTuple):
    """The parsed name of an unfinished entry.

    Attributes:
        path: final path, which the entry had or is to get.
        owner: process that the entry belongs to; ``None`` if an earlier version of this package made it.
        kind: operation in progress.
    """

    path: Path
    owner: Owner | None
    kind: Kind

    @classmethod
    def parse(cls, entry: Path) -> Unfinished | None:
        """Parse an entry's name; ``None`` if it is not that of an unfinished entry."""
        match = _UNFINISHED.fullmatch(entry.name)
        if match is None:
            return None
        owner = None if match[2] is None else Owner.of_mark(match[2])
        return cls(entry.parent.parent / match[1], owner, match[3])  # type: ignore[arg-type]


def place_for(path: Path, kind: Kind) -> Path:
    """A unique path for unfinished work of this process."""
    return path.parent / UNFINISHED / f"{path.name}.{Owner.own().mark()}.{kind}"


def unfinished_of(path: Path) -> list[tuple[Path, Unfinished]]:
    """Unfinished entries whose final path is ``path``."""
    try:
        found = [(entry, Unfinished.parse(entry)) for entry in sorted((path.parent / UNFINISHED).iterdir())]
    except OSError:
        return []
    return [(entry, name) for entry, name in found if name is not None and name.path.name == path.name]


def _clear_own(path: Path, kind: Kind, but: str = "") -> None:
    """Delete entries for ``path`` that this process has left after an interruption."""
    for entry, name in unfinished_of(path):
        if name.owner == Owner.own() and name.kind == kind and entry.name != but:
            delete(entry)


def prepare(path: Path, temporary: Path | None = None) -> Path:
    """Make the directory to write ``path`` into, ``temporary`` or a new one; clears older attempts of this process."""
    temporary = temporary or place_for(path, "saving")
    _clear_own(path, "saving", but=temporary.name)
    among_unfinished(temporary, partial(temporary.mkdir, exist_ok=True))
    return temporary


def among_unfinished(entry: Path, make: Callable[[], object]) -> None:
    """Create an entry in ``.unfinished``, retrying if another writer has just removed the empty folder.

    Another thread (a save in the background) or another run may remove it between the two steps here.
    """
    for attempt in range(_ATTEMPTS):
        try:
            entry.parent.mkdir(parents=True, exist_ok=True)
            make()
        except (FileNotFoundError, FileExistsError):  # mkdir says "exists" if the folder is removed meanwhile
            if attempt == _ATTEMPTS - 1:
                raise
        else:
            return


def discard(temporary: Path) -> None:
    """Delete the directory of a save that failed."""
    with suppress(OSError):
        delete(temporary)
    tidy(temporary.parent)


def publish(temporary: Path, path: Path) -> None:
    """Give the directory of :func:`prepare` its final name, and remove an older checkpoint of that name.

    Where the system can swap two names, ``path`` is a complete checkpoint at every moment. Elsewhere the older one is
    renamed first, and gets its name back after a crash between the two renames (``leftovers.recover``).
    """
    replaced = place_for(path, "replaced")
    sync_directory(temporary)
    if not os.path.lexists(path):
        os.rename(temporary, path)
    elif swap_entries(temporary, path):
        os.rename(temporary, replaced)
    else:
        os.rename(path, replaced)
        os.rename(temporary, path)
    sync_directory(path.parent)
    _clear_own(path, "replaced")
    tidy(replaced.parent)


def remove(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint (a directory, a file or a link); nothing happens if there is none.

    It loses its name first, so that a half-deleted directory never looks like a checkpoint. Call it on one rank.
    """
    path = Path(path)
    if path.is_dir() and not path.is_symlink():
        going = place_for(path, "removing")
        among_unfinished(going, lambda: os.rename(path, going))
        sync_directory(path.parent)
        _clear_own(path, "removing")
        tidy(going.parent)
    else:
        path.unlink(missing_ok=True)


def links_in(folder: Path) -> dict[Path, str]:
    """The symbolic links of a folder, with their targets as they are stored."""
    if not folder.is_dir():
        return {}
    return {entry: os.readlink(entry) for entry in folder.iterdir() if entry.is_symlink()}


def link_end(link: Path, target: str) -> Path:
    """Absolute path of a link's target."""
    return Path(os.path.abspath(link.parent / target))


def remove_unlinked(paths: Iterable[Path]) -> list[Path]:
    """Remove checkpoints that no link in their folder points to, and return the others; all paths are absolute."""
    free, waiting = unlinked(paths)
    for path in free:
        remove(path)
    return waiting


def unlinked(paths: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """Split absolute paths into those that no link in their folder points to (links first), and the others.

    A link that is itself among the paths does not count.
    """
    free: list[Path] = []
    waiting: list[Path] = []
    paths = sorted(paths, key=lambda path: not path.is_symlink())
    for path in paths:
        ends = {link_end(link, target) for link, target in links_in(path.parent).items() if link not in paths}
        (waiting if path in ends else free).append(path)
    return free, waiting


def relink(link: Path, target: str | None) -> None:
    """Point a link to another target atomically; ``None`` removes the link."""
    if target is None:
        link.unlink(missing_ok=True)
        return
    other = place_for(link, "linking")
    among_unfinished(other, lambda: os.symlink(target, other))
    os.replace(other, link)
    sync_directory(link.parent)
    tidy(other.parent)


def swap_entries(a: Path, b: Path) -> bool:
    """Swap two names atomically; ``False`` where the system or the file system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    return rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0


def delete(path: Path) -> None:
    """Delete a file, a link or a directory."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def tidy(folder: Path) -> None:
    """Remove an empty folder of unfinished work."""
    with suppress(OSError):  # something else is in progress there
        folder.rmdir()
