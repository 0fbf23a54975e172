"""How a directory comes to have its final name, and loses it: at once or not at all.

Work in progress lies in a hidden folder beside the checkpoint, because Lightning takes what it finds in the folder
itself for checkpoints by parts of the name (``last*.ckpt``, any ``hpc_ckpt_N``). Each piece of it has a name of its own
that leads to the process it belongs to: nobody writes into, publishes or clears what is somebody else's.
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

UNFINISHED = ".unfinished"

_ATTEMPTS = 100
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2

Kind = Literal["saving", "replaced", "removing", "linking"]
_UNFINISHED = re.compile(r"(.+?)(?:\.([0-9a-f]+(?:-[0-9a-f]+){3}))?\.(saving|replaced|removing|linking)")


class Unfinished(NamedTuple):
    """The name of a piece of unfinished work.

    Attributes:
        path: what it is to be, or was.
        owner: the process that it belongs to; ``None`` if an earlier version of this package made it.
        kind: what is done with it.
    """

    path: Path
    owner: Owner | None
    kind: Kind

    @classmethod
    def parse(cls, entry: Path) -> Unfinished | None:
        """Take a name apart; ``None`` for what is nobody's unfinished work."""
        match = _UNFINISHED.fullmatch(entry.name)
        if match is None:
            return None
        owner = None if match[2] is None else Owner.of_mark(match[2])
        return cls(entry.parent.parent / match[1], owner, match[3])  # type: ignore[arg-type]


def place_for(path: Path, kind: Kind) -> Path:
    """A place for unfinished work that nobody else gets."""
    return path.parent / UNFINISHED / f"{path.name}.{Owner.own().mark()}.{kind}"


def unfinished_of(path: Path) -> list[tuple[Path, Unfinished]]:
    """Unfinished entries that are to be ``path``, or were."""
    try:
        found = [(entry, Unfinished.parse(entry)) for entry in sorted((path.parent / UNFINISHED).iterdir())]
    except OSError:
        return []
    return [(entry, name) for entry, name in found if name is not None and name.path.name == path.name]


def _clear_own(path: Path, kind: Kind, but: str = "") -> None:
    """Delete what this process has begun for ``path`` and was interrupted in."""
    for entry, name in unfinished_of(path):
        if name.owner == Owner.own() and name.kind == kind and entry.name != but:
            delete(entry)


def prepare(path: Path, temporary: Path | None = None) -> Path:
    """A directory to write ``path`` into: ``temporary``, or a new one; clears what this process has begun before."""
    temporary = temporary or place_for(path, "saving")
    _clear_own(path, "saving", but=temporary.name)
    among_unfinished(temporary, partial(temporary.mkdir, exist_ok=True))
    return temporary


def among_unfinished(entry: Path, make: Callable[[], object]) -> None:
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


def discard(temporary: Path) -> None:
    """Drop what :func:`prepare` made: the save failed."""
    with suppress(OSError):
        delete(temporary)
    tidy(temporary.parent)


def publish(temporary: Path, path: Path) -> None:
    """Give what :func:`prepare` made its final name, in place of what has it now.

    Where the system can exchange two names there is no moment without a complete checkpoint under ``path``. Elsewhere
    the old one steps aside first, and comes back after a crash between the two renames (``leftovers.recover``).
    """
    replaced = place_for(path, "replaced")
    sync_directory(temporary)
    if not os.path.lexists(path):
        os.rename(temporary, path)
    elif exchange(temporary, path):
        os.rename(temporary, replaced)
    else:
        os.rename(path, replaced)
        os.rename(temporary, path)
    sync_directory(path.parent)
    _clear_own(path, "replaced")
    tidy(replaced.parent)


def remove(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint (a directory, a file or a link); nothing happens if there is none.

    It loses its name first: a half-deleted directory never looks like a checkpoint. Call it on one rank.
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
    """The symbolic links of a folder, and what is written in them."""
    if not folder.is_dir():
        return {}
    return {entry: os.readlink(entry) for entry in folder.iterdir() if entry.is_symlink()}


def link_end(link: Path, target: str) -> Path:
    """Where a link leads in which ``target`` is written."""
    return Path(os.path.abspath(link.parent / target))


def remove_unlinked(paths: Iterable[Path]) -> list[Path]:
    """Remove checkpoints to which no link beside them leads; the others, absolute paths all, are returned."""
    free, waiting = unlinked(paths)
    for path in free:
        remove(path)
    return waiting


def unlinked(paths: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """Those to which no link beside them leads, links first, and the others; absolute paths all.

    A link that is among them does not count.
    """
    free: list[Path] = []
    waiting: list[Path] = []
    paths = sorted(paths, key=lambda path: not path.is_symlink())
    for path in paths:
        ends = {link_end(link, target) for link, target in links_in(path.parent).items() if link not in paths}
        (waiting if path in ends else free).append(path)
    return free, waiting


def lead(link: Path, target: str | None) -> None:
    """Let a link lead elsewhere, in one step; ``None`` removes it."""
    if target is None:
        link.unlink(missing_ok=True)
        return
    other = place_for(link, "linking")
    among_unfinished(other, lambda: os.symlink(target, other))
    os.replace(other, link)
    sync_directory(link.parent)
    tidy(other.parent)


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


def delete(path: Path) -> None:
    """Delete whatever is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def tidy(folder: Path) -> None:
    """Remove a folder of unfinished work that is empty."""
    with suppress(OSError):  # something else is in progress there
        folder.rmdir()
