"""Files that grow under a name of their own, and get the right one when they are complete and on the disk.

Whoever writes one holds a lock on it for as long as it lives, which ends with the process, however that ends. So what
dead runs have left is known by its lock being free, also from another machine, and goes when the same name is written
again. Where a file system has no locks, it stays.
"""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from lightning_megatron.files.writing import writing

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]


class GrowingFile:
    """A file of its own beside ``final``; it has the permissions that any new file of the user's would have.

    Args:
        final: the name that :meth:`publish` gives it.

    Attributes:
        path: its name until then.
        stream: to write to.
    """

    def __init__(self, final: Path) -> None:
        self._final = final
        final.parent.mkdir(parents=True, exist_ok=True)
        sweep(final)
        self.path, self.stream = _locked(final)

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        with writing(self.path):
            self.stream.flush()
            os.fsync(self.stream.fileno())

    def publish(self) -> None:
        """Give it its name, once it is on the disk."""
        self.sync()
        os.replace(self.path, self._final)
        self.stream.close()

    def discard(self) -> None:
        """Drop it, unless it is published."""
        if self.stream.closed:
            return
        with suppress(OSError):  # what is still in memory may find no space
            self.stream.close()
        self.path.unlink(missing_ok=True)


def sweep(path: Path) -> None:
    """Clear what dead runs have left of a file that was to be called so."""
    if fcntl is None:
        return
    for left in path.parent.glob("*"):
        if left.name.startswith(f"{path.name}.tmp-"):
            with suppress(OSError), left.open("rb") as stream:  # somebody writes it, or there are no locks
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()


def _locked(path: Path) -> tuple[Path, BinaryIO]:
    while True:
        own = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex}")
        stream = own.open("xb")  # not tempfile's, which are the user's alone whatever the umask says
        if fcntl is not None:
            with suppress(OSError):
                fcntl.flock(stream, fcntl.LOCK_EX)
        if os.fstat(stream.fileno()).st_nlink:  # nobody has swept it away before it was locked
            return own, stream
        stream.close()
