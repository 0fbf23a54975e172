"""Errors of writing with the name of the file: the system's "No space left on device" has none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add a file's name to errors of the system that have none.

    Raises:
        OSError: the error, with the name.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)
        raise
