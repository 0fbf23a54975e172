"""Waits until files and names are on the disk, where they outlive a crash of the machine."""

from __future__ import annotations

import os
from pathlib import Path


def sync_file(file: Path) -> None:
    """Wait until a file is on the disk."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(directory: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    if os.name == "posix":
        sync_file(directory)
