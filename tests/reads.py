"""Reads of a checkpoint's files by what interprets their content, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

TOLD_BY = ("meta.pt", ".metadata", "manifest.json")
"""Files that say what is in a checkpoint."""


@contextmanager
def reads_of(checkpoint: Path) -> Iterator[Counter[str]]:
    """Number of times that each of these files is read in this process; hashing, which is unbuffered, is left out."""
    found: Counter[str] = Counter()
    really = Path.open

    def counted(file: Path, *args: Any, **options: Any) -> Any:
        if file.parent == checkpoint and file.name in TOLD_BY and "buffering" not in options:
            found[file.name] += 1
        return really(file, *args, **options)

    with patch.object(Path, "open", counted):
        yield found
