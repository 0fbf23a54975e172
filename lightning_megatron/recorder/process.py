"""State of a process on this host, from Linux's ``/proc``; other systems only tell if the process exists."""

from __future__ import annotations

import os
import signal
from enum import IntEnum
from typing import NamedTuple


class ProcessState(IntEnum):
    """State of a process as another rank has seen it; ``RUNNING`` also if no rank has checked it."""

    RUNNING = 0
    STOPPED = 1
    DEAD = 2
    ENDED_BY_LAUNCHER = 3


class Process(NamedTuple):
    """State of a process.

    Attributes:
        state: ``RUNNING``, ``STOPPED`` or ``DEAD``.
        status: exit status of a dead process, negative for a signal; ``None`` if it is not known.
    """

    state: ProcessState
    status: int | None = None


def _fields(pid: int) -> list[str]:
    with open(f"/proc/{pid}/stat", "rb") as file:
        # The name of the program is in parentheses and may contain anything.
        return file.read().decode(errors="replace").rpartition(")")[2].split()


def start_of(pid: int) -> int:
    """Start of a process, in ticks since the machine started; 0 if the system does not say."""
    try:
        return int(_fields(pid)[19])
    except (OSError, IndexError, ValueError):
        return 0


def inspect_process(pid: int, start: int) -> Process:
    """Ask the system for the state of a process.

    Args:
        pid: process id.
        start: result of :func:`start_of` for the process; it differs if another process has reused the id.
    """
    try:
        fields = _fields(pid)
    except OSError:
        return Process(ProcessState.RUNNING if is_there(pid) else ProcessState.DEAD)
    if start and int(fields[19]) != start:
        return Process(ProcessState.DEAD)
    if fields[0] in "ZX":
        return Process(ProcessState.DEAD, _status(fields))
    return Process(ProcessState.STOPPED if fields[0] in "Tt" else ProcessState.RUNNING)


def _status(fields: list[str]) -> int | None:
    """Exit status of a process whose parent has not waited for it yet."""
    word = int(fields[49]) if len(fields) > 49 else 0
    return os.waitstatus_to_exitcode(word) if word else None


def is_there(pid: int) -> bool:
    """True if a process exists, even one of another user that ``/proc`` hides."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def describe_exit(status: int | None) -> str:
    """Describe an exit status in words."""
    if status is None:
        return "gone"
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
