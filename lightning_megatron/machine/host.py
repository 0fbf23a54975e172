"""Limits of the host: shared memory and open files."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from lightning_megatron.machine.finding import Finding

SHARED_MEMORY = Path("/dev/shm")
ENOUGH_SHARED_BYTES = 10 << 30
"""Shared memory for DataLoader workers in Intel's container recipes; a container's default is 64 MiB."""
MANY_RANKS = 128
"""Number of ranks above which connections exceed the usual limit of open files (Intel's Megatron-LM, README)."""
_ENOUGH_FILES = 1 << 16


def shared_memory(directory: Path = SHARED_MEMORY, enough: int = ENOUGH_SHARED_BYTES) -> Finding:
    """Size of the file system through which DataLoader workers pass batches."""
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
    """Raise this process's limit of open files to its hard limit, if a job of so many ranks needs it."""
    if world_size > MANY_RANKS:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if not _at_least(soft, _ENOUGH_FILES) and soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return open_files(world_size)


def _limits_advice(world_size: int) -> str:
    lines = "; ".join(f"{user} {kind} nofile unlimited" for user in ("*", "root") for kind in ("soft", "hard"))
    return f"too few for the connections of {world_size} ranks: put into /etc/security/limits.conf: {lines}"


def _at_least(limit: int, wanted: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= wanted


def _count(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
