"""The process that unfinished work belongs to, and if it is still alive: without asking it, and without a clock.

A process is known by its number and by when the kernel started it, which together are never given twice. Both count
only in the process's own place: the same boot of a machine and the same space of process numbers, since containers
have one each. Of a process elsewhere nothing is known but how long ago it left a trace.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

_NOWHERE = "0"
_MARK = re.compile(r"([0-9a-f]+)-(\d+)-(\d+)-[0-9a-f]+")


@dataclass(frozen=True)
class Owner:
    """A process.

    Attributes:
        place: a short hash of the boot and of the space of process numbers; ``"0"`` where the system tells neither.
        pid: its number.
        started: the kernel's clock at its start.
    """

    place: str
    pid: int
    started: int

    @classmethod
    def own(cls) -> Owner:
        """This process."""
        return cls(_place(), os.getpid(), _started(os.getpid()) or 0)

    @classmethod
    def of_mark(cls, text: str) -> Owner | None:
        """The process that has made a mark; ``None`` if it is none."""
        match = _MARK.fullmatch(text)
        return None if match is None else cls(match[1], int(match[2]), int(match[3]))

    def mark(self) -> str:
        """A part of a file name that nobody else gives, and that leads back to this process."""
        return f"{self.place}-{self.pid}-{self.started}-{secrets.token_hex(4)}"

    @property
    def is_alive(self) -> bool | None:
        """True if it runs, False if it has surely ended, ``None`` where this process cannot see it."""
        if self.place == _NOWHERE or self.place != _place():
            return None
        started = _started(self.pid)
        return None if started == 0 else started == self.started


def own_job() -> str:
    """This process in words, for those whom it keeps waiting: host, number, and the job where something started one."""
    text = f"process {os.getpid()} on {socket.gethostname()}"
    known = {"SLURM_JOB_ID": "Slurm job", "PBS_JOBID": "PBS job", "TORCHELASTIC_RUN_ID": "torchrun's run"}
    for name, what in known.items():
        if value := os.environ.get(name):
            return f"{what} {value}, {text}"
    return text


@functools.cache
def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        return _NOWHERE
    return hashlib.blake2b(f"{boot}{space}".encode(), digest_size=4).hexdigest()


def _started(pid: int) -> int | None:
    """The kernel's clock at a process's start; ``None`` if there is none, 0 if it is another user's and hidden."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except OSError:
            return 0
        return None  # it came just now, or there is no such file system, and then no place either
    state, *fields = text.rpartition(")")[2].split()  # the name before may hold anything
    return None if state in "ZX" else int(fields[18])  # one that has ended may wait for its parent
