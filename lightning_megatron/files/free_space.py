"""Check of the free space on a disk before long work begins."""

from __future__ import annotations

import shutil
from pathlib import Path

from lightning_megatron.errors import DataError


def require_space(needed: int, output_prefix: str | Path) -> int:
    """Free bytes on the disk of the output, whose files begin with the prefix.

    Raises:
        DataError: if there are fewer than needed.
    """
    folder = Path(output_prefix).absolute().parent
    while not folder.is_dir():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > free:
        fault = f"the output will take about {readable(needed)}, and {readable(free)} are free"
        do = "free some, write elsewhere, or take a part of the input; --skip-space-check begins all the same"
        raise DataError.at(folder, fault, do=do)
    return free


def readable(size: int) -> str:
    """Bytes in MB or GB."""
    return f"{size / 2**20:,.1f} MB" if size < 10 * 2**30 else f"{size / 2**30:,.1f} GB"
