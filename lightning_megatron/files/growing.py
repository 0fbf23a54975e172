"""Files that are written under a temporary name, and renamed when they are complete and on the disk.

The writing process holds a lock on its file, which the system frees when the process ends in any way. So a file with a
free lock is the leftover of a dead run, even of one on another machine. It is removed when the same name is written
again. On a file system without locks it stays.
"""

from __future__ import annotations

import filecmp
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from lightning_megatron.files.durable import sync_directory
from lightning_megatron.files.writing import writing

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]


class GrowingFile:
    """A temporary file next to ``final``, open for writing, with the permissions of an ordinary new file."""

    def __init__(self, final: Path) -> None:
        self._final = final
        final.parent.mkdir(parents=True, exist_ok=True)
        sweep(final)
        self.path, self.stream = _locked(final)

    def sync(self) -> None:
        """Wait until the written bytes are on the disk."""
        with writing(self.path):
            self.stream.flush()
            os.fsync(self.stream.fileno())

    def publish(self) -> None:
        """Rename it to ``final``, once it is on the disk; then the name is on the disk, too."""
        self.sync()
        os.replace(self.path, self._final)
        self.stream.close()
        sync_directory(self._final.parent)

    def publish_unless_equal(self) -> None:
        """Publish it unless a file of the same name and content exists, which other processes may have mapped."""
        self.sync()
        try:
            os.link(self.path, self._final)  # unlike a rename, it fails if another process was faster
        except FileExistsError:
            if not filecmp.cmp(self.path, self._final, shallow=False):
                self.publish()
        except OSError:  # a file system without links
            self.publish()
        else:
            sync_directory(self._final.parent)
        self.discard()

    def discard(self) -> None:
        """Remove it, unless it is published."""
        if self.stream.closed:
            return
        with suppress(OSError):  # buffered bytes may find no space
            self.stream.close()
        self.path.unlink(missing_ok=True)


@contextmanager
def written_at_once(path: Path, *, keep_equal: bool = False) -> Iterator[BinaryIO]:
    """Open a new file that is at ``path`` once the block has ended; a block that raises leaves none.

    Args:
        path: its final name.
        keep_equal: True to keep a file there with the same content, which other processes may have mapped.

    Raises:
        OSError: naming the file, if the disk is full.
    """
    growing = GrowingFile(path)
    try:
        with writing(growing.path):
            yield growing.stream
        growing.publish_unless_equal() if keep_equal else growing.publish()
    finally:
        growing.discard()


def sweep(path: Path) -> None:
    """Remove temporary files that dead runs have left beside ``path``."""
    if fcntl is None:
        return
    for left in path.parent.glob("*"):
        if left.name.startswith(f"{path.name}.tmp-"):
            with suppress(OSError), left.open("rb") as stream:  # another process writes it, or there are no locks
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()


def _locked(path: Path) -> tuple[Path, BinaryIO]:
    while True:
        own = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex}")
        stream = own.open("xb")  # tempfile would ignore the umask and allow only the user
        if fcntl is not None:
            with suppress(OSError):
                fcntl.flock(stream, fcntl.LOCK_EX)
        if os.fstat(stream.fileno()).st_nlink:  # no other process has removed it before it was locked
            return own, stream
        stream.close()
