"""Hostsfiles, in which ``mpirun`` and its relatives find the machines of a job."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_megatron.errors import ConfigError, Problem

_ENTRY = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9A-Fa-f:]+\])(?P<rest>.*)")
_COUNTS = re.compile(r"(?:slots|max[_-]slots)=(?P<count>\d+)")


@dataclass(frozen=True)
class Host:
    """One machine of a job.

    Attributes:
        name: host name or address.
        slots: processes that it takes; ``None`` if the file does not say.
    """

    name: str
    slots: int | None = None

    def __str__(self) -> str:
        return self.name if self.slots is None else f"{self.name} slots={self.slots}"


def read_hosts(path: str | os.PathLike[str]) -> list[Host]:
    """The machines of a hostsfile, in its order; rank 0 runs on the first.

    A line is ``NAME``, ``NAME slots=8`` (Open MPI, DeepSpeed) or ``NAME:8`` (MPICH, Intel MPI); ``#`` begins a comment.

    Raises:
        ConfigError: with every line that is not understood, and every machine that is named twice.
        OSError: if the file cannot be read.
    """
    found: list[Host] = []
    problems: list[Problem] = []
    lines: dict[str, int] = {}
    for number, row in enumerate(Path(path).read_bytes().decode().split("\n"), 1):
        text = row.split("#", 1)[0].strip()
        if not text:
            continue
        where = f"{os.fspath(path)}:{number}"
        try:
            host = _host(text)
        except ValueError as error:
            problems.append(Problem(where, text, str(error)))
            continue
        if host.name in lines:
            problems.append(Problem(where, text, f"line {lines[host.name]} names {host.name}, too"))
        lines.setdefault(host.name, number)
        found.append(host)
    if not found and not problems:
        problems.append(Problem("hostsfile", os.fspath(path), "names no machine"))
    if problems:
        raise ConfigError(problems)
    return found


def slots_of(hosts: Sequence[Host], world_size: int, source: str) -> int:
    """Processes of each machine of a job; errors name the source, a file or an argument.

    Raises:
        ConfigError: if the slots do not add up to the ranks, or differ from machine to machine.
    """
    each = [host.slots for host in hosts]
    if len(set(each)) > 1:
        told = ", ".join(map(str, hosts))
        raise ConfigError([Problem(source, told, "every machine of a job needs equally many slots")])
    slots = each[0] if each[0] is not None else world_size // len(hosts)
    if slots * len(hosts) != world_size:
        reason = (
            f"{len(hosts)} machines with {slots} slots are {slots * len(hosts)} ranks, but the job has {world_size}"
        )
        raise ConfigError([Problem(source, ", ".join(map(str, hosts)), reason)])
    return slots


def _host(text: str) -> Host:
    """Parse one line.

    Raises:
        ValueError: with the fault of the line.
    """
    entry = _ENTRY.fullmatch(text)
    if entry is None:
        raise ValueError("a line is NAME, NAME slots=8 or NAME:8")
    rest = entry["rest"].strip()
    if not rest:
        return Host(entry["name"])
    if rest.startswith(":") and rest[1:].isdigit():
        return _with_slots(entry["name"], int(rest[1:]))
    counts = {}
    for word in rest.split():
        given = _COUNTS.fullmatch(word)
        if given is None or not entry["rest"].startswith((" ", "\t")):
            raise ValueError(f"{word!r} is not understood: a line is NAME, NAME slots=8 or NAME:8")
        counts[word.split("=")[0]] = int(given["count"])
    return _with_slots(entry["name"], counts["slots"]) if "slots" in counts else Host(entry["name"])


def _with_slots(name: str, slots: int) -> Host:
    if slots < 1:
        raise ValueError("a machine without slots takes no process")
    return Host(name, slots)
