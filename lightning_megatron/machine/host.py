"""What the machine around the devices must offer: memory that processes share, and enough open files."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from lightning_megatron.machine.finding import Finding

SHARED_MEMORY = Path("/dev/shm")
ENOUGH_SHARED_BYTES = 10 << 30
"""What Intel's container recipes give to workers of DataLoaders; a container's default is 64 MiB."""
MANY_RANKS = 128
"""Above so many ranks, connections run into the usual limit of open files (Intel's Megatron-LM, README)."""
_ENOUGH_FILES = 1 << 16


def shared_memory(directory: Path = SHARED_MEMORY, enough: int = ENOUGH_SHARED_BYTES) -> Finding:
    """The size of the file system through which workers hand over batches."""
    if not directory.is_dir():
        return Finding(str(directory), "absent", "workers of DataLoaders cannot hand over batches: use num_workers=0")
    stat = os.statvfs(directory)
    size = stat.f_frsize * stat.f_blocks
    advice = f"small for DataLoader workers: start the container with --shm-size={enough >> 30}g, or use num_workers=0"
    return Finding(str(directory), f"{size / (1 << 30):.1f} GiB", "" if size >= enough else advice, harmful=False)


def open_files(world_size: int) -> Finding:
    """The limit of open files, for a job of so many ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    value = f"{_count(soft)}, at most {_count(hard)}"
    enough = world_size <= MANY_RANKS or _at_least(soft, _ENOUGH_FILES)
    return Finding("open files", value, "" if enough else _limits_advice(world_size))


def raise_open_files(world_size: int) -> Finding:
    """Raise the limit of open files of this process as far as it may itself, if a job of so many ranks needs it."""
    if world_size > MANY_RANKS:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if not _at_least(soft, _ENOUGH_FILES) and soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return open_files(world_size)


def _limits_advice(world_size: int) -> str:
    lines = "; ".join(f"{who} {kind} nofile unlimited" for who in ("*", "root") for kind in ("soft", "hard"))
    return f"too few for the connections of {world_size} ranks: put into /etc/security/limits.conf: {lines}"


def _at_least(limit: int, wanted: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= wanted


def _count(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
