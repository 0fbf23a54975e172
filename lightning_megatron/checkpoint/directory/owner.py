"""The process that unfinished work belongs to, and a test whether it is alive, without clocks or messages.

A process is identified by its number and its start time in the kernel, which together are never reused. Both are valid
only in one place: the same boot of a machine and the same PID namespace, since each container has its own. Processes
elsewhere cannot be looked up; only the times of their files show whether they are alive.
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

from lightning_megatron.recorder.process import ProcessState, inspect_process, is_there, start_of

_NOWHERE = "0"
_MARK = re.compile(r"([0-9a-f]+)-(\d+)-(\d+)-[0-9a-f]+")


@dataclass(frozen=True)
class Owner:
    """A process.

    Attributes:
        place: short hash of the boot and the PID namespace; ``"0"`` where the system tells neither.
        pid: process number.
        started: start time by the kernel's clock.
    """

    place: str
    pid: int
    started: int

    @classmethod
    def own(cls) -> Owner:
        """This process."""
        return cls(_place(), os.getpid(), start_of(os.getpid()))

    @classmethod
    def of_mark(cls, text: str) -> Owner | None:
        """The process that has made a mark; ``None`` if the text is not a mark."""
        match = _MARK.fullmatch(text)
        return None if match is None else cls(match[1], int(match[2]), int(match[3]))

    def mark(self) -> str:
        """A unique part of a file name that identifies this process."""
        return f"{self.place}-{self.pid}-{self.started}-{secrets.token_hex(4)}"

    @property
    def is_alive(self) -> bool | None:
        """True if it runs, False if it has ended, ``None`` if this process cannot look it up."""
        if self.place == _NOWHERE or self.place != _place():
            return None
        started = start_of(self.pid)
        if not started and is_there(self.pid):
            return None  # of another user, and hidden
        return started == self.started and inspect_process(self.pid, started).state != ProcessState.DEAD


def own_job() -> str:
    """Description of this process for runs that wait for it: host, number and the scheduler's job."""
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
