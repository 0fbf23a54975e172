"""Small files that are read whole, up to a maximum length.

A folder from elsewhere may contain links to files of any length, and to devices and pipes, which never end.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

LONGEST = 1 << 28
"""Bytes: several times the longest published vocabulary and list of files."""


MOST_NODES = 1_000_000
"""Values of a YAML text with its aliases written out: a thousand times the longest recipe."""


def read_small(file: str | os.PathLike[str], longest: int = LONGEST) -> bytes:
    """The content of an ordinary file.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is not an ordinary file, or longer.
    """
    if not stat.S_ISREG(os.stat(file).st_mode):  # before opening, which would block on a pipe
        raise ValueError("no ordinary file")
    with Path(file).open("rb") as stream:
        content = stream.read(longest + 1)
    if len(content) > longest:
        raise ValueError(f"longer than {longest} bytes, which no file of its kind is")
    return content


def read_yaml(text: str) -> Any:
    """The value in a YAML text.

    Raises:
        ValueError: if its aliases would make more than ``MOST_NODES`` values of it.
        yaml.YAMLError: if it is not YAML.
    """
    import yaml

    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is not None and _written_out(node, {}) > MOST_NODES:
            raise ValueError(
                f"its aliases (*name) multiply to more than {MOST_NODES:,} values: write out what is meant"
            )
        return None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


def _written_out(node: Any, sizes: dict[int, float]) -> float:
    """Values under a YAML node with every alias written out; infinite for one that contains itself."""
    if id(node) not in sizes:
        sizes[id(node)] = float("inf")
        pairs = node.value if isinstance(node.value, list) else ()
        children = [child for pair in pairs for child in (pair if isinstance(pair, tuple) else (pair,))]
        sizes[id(node)] = 1 + sum(_written_out(child, sizes) for child in children)
    return sizes[id(node)]


def read_json(file: str | os.PathLike[str]) -> Any:
    """The value in a JSON file.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is not a file, or not JSON; the text can follow the name of the file.
    """
    try:
        return json.loads(read_small(file).decode("utf-8"))
    except RecursionError:
        raise ValueError("its brackets are nested too deep for JSON") from None


def read_object(file: str | os.PathLike[str]) -> dict[str, Any]:
    """The object in a JSON file; raises as :func:`read_json`, also for any other value."""
    content = read_json(file)
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    return content
