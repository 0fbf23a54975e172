"""Limits of the host: shared memory, open files, lengths of the paths of sockets."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Sequence
from multiprocessing.util import get_temp_dir
from pathlib import Path

from lightning_megatron.machine.finding import Finding

SHARED_MEMORY = Path("/dev/shm")
ENOUGH_SHARED_BYTES = 10 << 30
"""Shared memory for DataLoader workers in Intel's container recipes; a container's default is 64 MiB."""
MANY_RANKS = 128
"""Number of ranks above which connections exceed the usual limit of open files (Intel's Megatron-LM, README)."""
_ENOUGH_FILES = 1 << 16
_SOCKET_PATH_BYTES = 103
"""Longest path of a socket on macOS; on Linux it is 107."""
_SOCKET_NAME = "/pymp-12345678/listener-12345678"
"""Name that ``multiprocessing`` gives a socket, below the folder for temporary files."""


def shared_memory(directory: Path = SHARED_MEMORY, enough: int = ENOUGH_SHARED_BYTES) -> Finding:
    """Size of the file system through which DataLoader workers pass batches."""
    if not directory.is_dir():
        return Finding(str(directory), "absent", "workers of DataLoaders cannot hand over batches: use num_workers=0")
    stat = os.statvfs(directory)
    size = stat.f_frsize * stat.f_blocks
    advice = f"small for DataLoader workers: start the container with --shm-size={enough >> 30}g, or use num_workers=0"
    return Finding(str(directory), f"{size / (1 << 30):.1f} GiB", "" if size >= enough else advice, harmful=False)


def open_files(world_size: int) -> Finding:
    """Check the limit of open files for a job of ``world_size`` ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    value = f"{_count(soft)}, at most {_count(hard)}"
    enough = world_size <= MANY_RANKS or _at_least(soft, _ENOUGH_FILES)
    return Finding("open files", value, "" if enough else _limits_advice(world_size))


def raise_open_files(world_size: int) -> Finding:
    """Raise this process's limit of open files to its hard limit, if a job of ``world_size`` ranks needs it."""
    if world_size > MANY_RANKS:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if not _at_least(soft, _ENOUGH_FILES) and soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return open_files(world_size)


def shorten_socket_paths(folders: Sequence[str] = ("/tmp", "/var/tmp")) -> Finding:
    """Let ``multiprocessing`` put the sockets of this process and its children into a folder with a short path.

    Workers of a DataLoader pass tensors through such a socket. Where ``TMPDIR`` has a long path they cannot make one,
    and the rank would wait for a batch for ever. Newer versions of Python choose a short folder by themselves.

    Args:
        folders: folders to try where the folder for temporary files has too long a path.
    """
    given, named = tempfile.gettempdir(), tempfile.tempdir
    if _fits_socket(given):
        return Finding("TMPDIR", given)
    tempfile.tempdir = next((folder for folder in folders if os.access(folder, os.W_OK)), named)
    try:
        used = os.path.dirname(get_temp_dir())  # a folder that it makes and keeps until the process ends
    finally:
        tempfile.tempdir = named
    longest = _SOCKET_PATH_BYTES - len(_SOCKET_NAME)
    advice = f"its path is too long for a socket: workers of DataLoaders need one of at most {longest} bytes"
    return Finding("TMPDIR", used, "" if _fits_socket(used) else advice)


def _fits_socket(folder: str) -> bool:
    return len(os.fsencode(folder) + _SOCKET_NAME.encode()) <= _SOCKET_PATH_BYTES


def _limits_advice(world_size: int) -> str:
    lines = "; ".join(f"{user} {kind} nofile unlimited" for user in ("*", "root") for kind in ("soft", "hard"))
    return f"too few for the connections of {world_size} ranks: put into /etc/security/limits.conf: {lines}"


def _at_least(limit: int, wanted: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= wanted


def _count(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
