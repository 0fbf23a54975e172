"""Errors while a file is written, with its name: the system says "No space left on device", and not where."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name a file in what the system says of it; an error that names a file already is left as it is.

    Args:
        path: the file.

    Raises:
        OSError: as it was, with the name.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)
        raise
