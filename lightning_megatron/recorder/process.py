"""A process on this host, as the system sees it: Linux's /proc; elsewhere only whether it is there."""

from __future__ import annotations

import os
import signal
from enum import IntEnum
from typing import NamedTuple


class ProcessState(IntEnum):
    """State of a process as another rank has seen it."""

    RUNNING = 0
    STOPPED = 1
    DEAD = 2
    ENDED_BY_LAUNCHER = 3


class Process(NamedTuple):
    """State of a process.

    Attributes:
        seen: ``NOTHING`` where it is running, ``STOPPED`` or ``DEAD``.
        status: exit status of one that is dead, negative for a signal; ``None`` where nobody says.
    """

    state: ProcessState
    status: int | None = None


def _fields(pid: int) -> list[str]:
    with open(f"/proc/{pid}/stat", "rb") as file:
        # The name stands in parentheses and may hold anything.
        return file.read().decode(errors="replace").rpartition(")")[2].split()


def start_of(pid: int) -> int:
    """Start of a process, in ticks since the machine did; 0 where the system does not say."""
    try:
        return int(_fields(pid)[19])
    except (OSError, IndexError, ValueError):
        return 0


def inspect_process(pid: int, start: int) -> Process:
    """The state of a process.

    Args:
        pid: its number.
        start: its :func:`start_of`: another process may have the number by now.
    """
    try:
        fields = _fields(pid)
    except (FileNotFoundError, ProcessLookupError):
        if not os.path.isdir("/proc/self"):
            return Process(ProcessState.RUNNING if _is_there(pid) else ProcessState.DEAD)
        return Process(ProcessState.DEAD)
    except OSError:
        return Process(ProcessState.RUNNING)
    if start and int(fields[19]) != start:
        return Process(ProcessState.DEAD)
    if fields[0] in "ZX":
        return Process(ProcessState.DEAD, _status(fields))
    return Process(ProcessState.STOPPED if fields[0] in "Tt" else ProcessState.RUNNING)


def _status(fields: list[str]) -> int | None:
    """The exit status of one that nobody has waited for yet."""
    word = int(fields[49]) if len(fields) > 49 else 0
    return os.waitstatus_to_exitcode(word) if word else None


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def describe_exit(status: int | None) -> str:
    """An exit status for a reader."""
    if status is None:
        return "gone"
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
