"""Checks that files mapped into memory keep their length.

A process that reads beyond the end of a mapped file dies of SIGBUS without a message. So lengths are checked during
reading: a file that was truncated is an error with its name, unless it happens between two checks. A file that was
replaced or removed is no fault: its mapping stays valid.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from lightning_megatron.errors import DataError

_PAUSE = 0.002
"""Seconds between two checks. A check takes microseconds on a local disk, up to a millisecond on a shared one."""


class MappedFiles:
    """Lengths of files that this process has mapped; unpickling reads them again."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._known = {path: _Length.of(path) for path in paths}
        self._next_check = 0.0

    def check(self) -> None:
        """Check the lengths, unless that was just done.

        Raises:
            DataError: if a file is shorter than it was.
        """
        now = time.monotonic()
        if now < self._next_check:
            return
        for path, before in self._known.items():
            try:
                after = _Length.of(path)
            except OSError:
                continue
            if after.is_less_of(before):
                fault = f"cut off while it was in use: {after.bytes} bytes, {before.bytes} were there"
                do = "replace data under another name, or let runs that read it end first"
                raise DataError.at(path, fault, do=do)
        self._next_check = now + _PAUSE  # not after a fault: a DataLoader's worker reads on at once

    def __reduce__(self) -> tuple[type[MappedFiles], tuple[list[Path]]]:
        return MappedFiles, (list(self._known),)


class _Length(NamedTuple):
    """Length and identity of a file."""

    bytes: int
    inode: int
    device: int

    @classmethod
    def of(cls, path: Path) -> _Length:
        status = os.stat(path)
        return cls(status.st_size, status.st_ino, status.st_dev)

    def is_less_of(self, before: _Length) -> bool:
        return self.bytes < before.bytes and self[1:] == before[1:]
