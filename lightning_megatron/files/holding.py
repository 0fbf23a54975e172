"""A lock that a process holds until it ends in any way."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]


@contextmanager
def holding(path: Path) -> Iterator[bool]:
    """Hold a lock on a file, created if necessary; yields ``False`` if another process holds it.

    On a file system without locks it always yields ``True``.
    """
    with path.open("ab") as stream:
        try:
            if fcntl is not None:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            yield error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
        else:
            yield True
