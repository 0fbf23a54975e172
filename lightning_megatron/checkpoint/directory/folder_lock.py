"""A folder of checkpoints belongs to one run at a time.

The lock is a directory in the folder of unfinished work. It is made elsewhere and renamed, which fails on every file
system if a lock is there already. It names its process, which other processes on the same machine look up; for those on
other machines a thread renews its time stamp, by the file system's clock. The lock of a dead process is renamed to a
name derived from the lock's own: of two processes that find it, only one succeeds, and a newer lock is never removed.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_megatron.checkpoint.directory.atomic_dir import UNFINISHED, Kind, among_unfinished, delete, tidy
from lightning_megatron.checkpoint.directory.leftovers import file_system_time, remove_stale
from lightning_megatron.checkpoint.directory.owner import Owner, own_job
from lightning_megatron.errors import CheckpointError

BEAT = 10.0
"""Seconds between signs of life."""

DEAD_AFTER = 120.0
"""Seconds without a sign of life after which a process that cannot be looked up counts as dead."""

_NAME, _NOTE = "lock", "owner.json"
_LOOK = 0.2

_log = logging.getLogger(__name__)


class FolderInUseError(CheckpointError):
    """Another run saves its checkpoints in the folder."""


class FolderLock:
    """Keeps other runs out of a folder of checkpoints, from :meth:`take` to :meth:`release`.

    Args:
        folder: folder of checkpoints; made if it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = folder / UNFINISHED / _NAME
        self._mark = Owner.own().mark()
        self._end = threading.Event()
        self._beats: threading.Thread | None = None
        self._made: list[Path] = []

    def take(self, patience: float = 0.0, say: Callable[[str], None] = _log.warning) -> None:
        """Take the lock, if necessary from a process that has died.

        Args:
            patience: seconds to wait for another run to end.
            say: function that gets one message about the run that holds the lock.

        Raises:
            FolderInUseError: if another run still holds it; the text names that run.
            OSError: if the folder cannot be written.
        """
        self._made = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        begun, has_said = time.monotonic(), False
        while not self._try():
            note, age = self._look()
            if note is None:
                continue
            whose = f"{note.get('job', 'another run')}, whose last sign of life is {max(age, 0.0):.0f} s old"
            if self._is_dead(note, age):
                self._break(note)
            elif (waited := time.monotonic() - begun) >= patience:
                raise FolderInUseError(_refusal(self.folder, whose, waited, self._lock))
            else:
                if not has_said:
                    say(f"waiting up to {patience:.0f} s for {whose}: it saves in {self.folder}")
                    has_said = True
                time.sleep(min(_LOOK, patience))
        self._beats = threading.Thread(target=self._beat, name=f"keeping {self.folder}", daemon=True)
        self._beats.start()

    def is_taken(self) -> bool:
        """True if any run holds the lock, alive or dead."""
        return self._lock.exists()

    def is_ours(self) -> bool:
        """True unless this process gave no sign of life for too long, and another run took the lock."""
        note, _ = self._look()
        return note is not None and note.get("mark") == self._mark

    def release(self) -> None:
        """Release the lock, and remove folders that were made for it and are still empty."""
        self._end.set()
        if self._beats is not None:
            self._beats.join()
        if self.is_ours():
            remove_stale(self.folder)
            with suppress(OSError):
                delete(self._take_away(self._mark))
        tidy(self.folder / UNFINISHED)
        for folder in self._made:
            tidy(folder)

    def _try(self) -> bool:
        own = self._beside(self._mark, "linking")
        note = {"job": own_job(), "mark": self._mark, "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        among_unfinished(own, lambda: own.mkdir(exist_ok=True))
        try:
            (own / _NOTE).write_text(json.dumps(note))
            os.rename(own, self._lock)
        except OSError as error:
            with suppress(OSError):
                delete(own)
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST) or self._lock.exists():
                return False
            raise
        return True

    def _look(self) -> tuple[dict[str, Any] | None, float]:
        """Content of the lock (``None`` without one), and the seconds since its last sign of life."""
        try:
            now = file_system_time(self._lock.parent)
            seen = times = self._lock.stat()
        except FileNotFoundError:
            return None, 0.0
        try:
            with (self._lock / _NOTE).open() as stream:  # opening makes a file server send the current times
                times = os.fstat(stream.fileno())
                note = json.load(stream)
        except FileNotFoundError:
            if not self._is_still(seen):
                return None, 0.0
            note = {}
        except ValueError:  # a machine went down before the note was on the disk
            note = {}
        return note, now - times.st_mtime

    def _is_still(self, seen: os.stat_result) -> bool:
        """True if the lock is the one that was seen: not gone, and no newer one in its place."""
        with suppress(FileNotFoundError):
            now = self._lock.stat()
            return (now.st_ino, now.st_ctime_ns) == (seen.st_ino, seen.st_ctime_ns)
        return False

    def _is_dead(self, note: dict[str, Any], age: float) -> bool:
        owner = Owner.of_mark(str(note.get("mark")))
        if owner == Owner.own():
            return True  # left by an earlier fit of this process
        is_alive = None if owner is None else owner.is_alive
        return abs(age) > DEAD_AFTER if is_alive is None else not is_alive

    def _break(self, note: dict[str, Any]) -> None:
        mark = str(note.get("mark"))
        try:
            self._take_away(mark if Owner.of_mark(mark) else self._mark)
        except OSError:  # another run was faster
            time.sleep(_LOOK)

    def _take_away(self, mark: str) -> Path:
        away = self._beside(mark, "removing")
        os.rename(self._lock, away)  # fails if ``away`` exists: the lock of that mark is gone, and this is another one
        return away

    def _beside(self, mark: str, kind: Kind) -> Path:
        """A path beside the lock; leftovers there are cleared once the process of that mark is dead."""
        return self._lock.with_name(f"{_NAME}.{mark}.{kind}")

    def _beat(self) -> None:
        """Give signs of life until the lock is released or lost."""
        while not self._end.wait(BEAT):
            with suppress(OSError):
                if not self.is_ours():
                    return
                os.utime(self._lock / _NOTE)


def _refusal(folder: Path, whose: str, waited: float, lock: Path) -> str:
    after = f" after {waited:.0f} s of waiting" if waited >= 1 else ""
    return (
        f"{folder} is in use{after}: {whose}, saves its checkpoints there. Two runs in one folder would remove and "
        f"replace each other's: wait for it to end, end it, or give ModelCheckpoint another dirpath. If you are sure "
        f"that it has died, on another machine, delete {lock}"
    )
