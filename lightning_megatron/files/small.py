"""Files that describe others and are read whole: as long as such a file may be, and no longer.

What a link leads to, and how long it is, is for whoever made the folder to say. A device or a pipe would never end.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

LONGEST = 1 << 28
"""Bytes: several times the longest vocabulary and the longest list of files that anybody has published."""


def read_small(file: str | os.PathLike[str], longest: int = LONGEST) -> bytes:
    """The content of an ordinary file.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is no file, or a longer one.
    """
    if not stat.S_ISREG(os.stat(file).st_mode):  # before it is opened, which a pipe would wait in
        raise ValueError("no ordinary file")
    with Path(file).open("rb") as stream:
        content = stream.read(longest + 1)
    if len(content) > longest:
        raise ValueError(f"longer than {longest} bytes, which no file of its kind is")
    return content


def read_json(file: str | os.PathLike[str]) -> Any:
    """The value in a JSON file.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is no file, or no JSON; with a reason to print behind the name of the file.
    """
    try:
        return json.loads(read_small(file).decode("utf-8"))
    except RecursionError:
        raise ValueError("no JSON that anybody needs: its brackets are nested too deep") from None


def read_object(file: str | os.PathLike[str]) -> dict[str, Any]:
    """The object in a JSON file; raises as :func:`read_json`, also for any other value."""
    content = read_json(file)
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    return content
