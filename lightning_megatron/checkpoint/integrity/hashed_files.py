"""Files that are hashed from the bytes in memory, and synced to the disk, while they are written."""

from __future__ import annotations

import io
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lightning_megatron.checkpoint.integrity.block_sums import BlockSums
from lightning_megatron.checkpoint.integrity.manifest import FileRecord, hash_of

_SMALL = 1 << 16  # bytes that are hashed faster than a thread is woken
_PIECE = 1 << 25  # bytes that go to the disk together
_SYNC = getattr(os, "fdatasync", os.fsync)


class HashedStream(io.BufferedIOBase):
    """A new file. Memory that has been written may be reused after each call.

    One thread hashes the bytes while the system copies them. Another one syncs the file every now and then, so that the
    ``fsync`` at the end finds most bytes on the disk. So the pool of ``threads`` needs two or more; other files may use
    them at other times.
    """

    def __init__(self, path: Path, threads: ThreadPoolExecutor) -> None:
        self._stream = path.open("wb")
        self._threads = threads
        self._sums = BlockSums()
        self._unsynced = 0
        self._syncing: Future[None] | None = None

    def record(self) -> FileRecord:
        """Length and hash of what has been written."""
        return FileRecord(self._sums.length, hash_of(self._sums.sums()))

    def writable(self) -> bool:
        """True, always."""
        return True

    def tell(self) -> int:
        """Bytes written so far."""
        return self._stream.tell()

    def write(self, data: Any) -> int:
        """Write and hash all bytes, and return their number.

        Raises:
            OSError: if the disk is full, even if an earlier write found no space.
        """
        content = memoryview(data).cast("B")
        self.put(content)
        return len(content)

    def put(self, content: memoryview) -> int:
        """Write and hash bytes as :meth:`write`, and return their CRC-32."""
        if len(content) < _SMALL:
            self._write(content)
            return self._sums.add(content)
        hashing = self._threads.submit(self._sums.add, content)
        try:
            for start in range(0, len(content), _PIECE):
                self._write(content[start : start + _PIECE])
        finally:
            found = hashing.result()  # the memory may be gone as soon as this returns
        return found

    def fileno(self) -> int:
        """File descriptor for ``fsync``, after a flush: torch 2.6 asks for it without calling ``flush``."""
        self.flush()
        self._end_sync()
        return self._stream.fileno()

    def flush(self) -> None:
        """Hand all bytes to the system."""
        if not self._stream.closed:
            self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        try:
            self._end_sync()
        finally:
            self._stream.close()
            super().close()

    def _write(self, content: memoryview) -> None:
        self._unsynced += self._stream.write(content)
        if self._unsynced >= _PIECE and (self._syncing is None or self._syncing.done()):
            self._end_sync()
            self._stream.flush()
            self._syncing = self._threads.submit(_SYNC, self._stream.fileno())
            self._unsynced = 0

    def _end_sync(self) -> None:
        """Wait for the sync thread. The system reports a disk error only once, so it must not be lost here."""
        syncing, self._syncing = self._syncing, None
        if syncing is not None:
            syncing.result()
