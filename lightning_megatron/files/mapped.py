"""Files that are mapped into memory, and must keep their length as long as they are.

A process that reads beyond the end of a mapped file dies of SIGBUS without a word. So their lengths are looked at
while they are read: a file that somebody cuts off is an error with its name, unless it happens within the pause
between two looks. One that is replaced or removed is no fault: what is mapped lives on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from lightning_megatron.errors import DataError

_PAUSE = 0.002
"""Seconds between two looks: on a local disk a look takes microseconds, on one that is shared up to a millisecond."""


class MappedFiles:
    """Lengths of files that this process has mapped; another process that gets it takes them anew.

    Args:
        paths: the files.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._known = {path: _Length.of(path) for path in paths}
        self._next_look = 0.0

    def check(self) -> None:
        """Look at them, unless that was just done.

        Raises:
            DataError: naming one that is shorter than it was.
        """
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _PAUSE
        for path, before in self._known.items():
            try:
                after = _Length.of(path)
            except OSError:
                continue
            if after.is_less_of(before):
                fault = f"cut off while it was in use: {after.bytes} bytes, {before.bytes} were there"
                do = "replace data under another name, or let runs that read it end first"
                raise DataError.at(path, fault, do=do)

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
