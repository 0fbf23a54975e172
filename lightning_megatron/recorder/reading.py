"""Reading the files of a run, of live and dead ranks."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lightning_megatron.recorder import file_format
from lightning_megatron.recorder.file_format import WORDS, Kind, State
from lightning_megatron.recorder.process import Process, ProcessState, inspect_process
from lightning_megatron.recorder.recorder import about_path, ring_path


@dataclass(frozen=True)
class Record:
    """One action of one rank. Times are ``time.time_ns()``; 0 for an event that has not happened yet.

    Attributes:
        number: number among the rank's actions, from 1.
        kind: kind of the action.
        begun: time of its begin.
        waiting: time when the thread began to block in it; 0 for an asynchronous call that is not waited for yet.
        ended: time of its end.
        size: bytes that are communicated.
        within: number among the collectives of its group, or among the messages of its kind and peer, from 1.
        step: optimizer steps taken before it.
        microbatch: number of the micro-batch within the step; -1 for none.
        peer: source or destination rank of a message; -1 for none.
        group: name of the group.
        stage: pipeline stage; -1 for none.
        detail: further description, such as a path.
    """

    number: int
    kind: Kind
    begun: int
    waiting: int = 0
    ended: int = 0
    size: int = 0
    within: int = 0
    step: int = 0
    microbatch: int = -1
    peer: int = -1
    group: str = ""
    stage: int = -1
    detail: str = ""

    @property
    def waits(self) -> bool:
        """True if it is a collective, a message or the rendezvous, and this rank is waiting in it."""
        meets = self.kind >= Kind.ALL_REDUCE or self.kind == Kind.RENDEZVOUS
        return meets and self.waiting > 0 and not self.ended

    def __str__(self) -> str:
        if self.kind < Kind.ALL_REDUCE:
            word = WORDS.get(self.kind, self.kind.name.lower())
            places = (("of stage", self.stage), ("micro-batch", self.microbatch))
            place = "".join(f" {name} {value}" for name, value in places if value >= 0)
            return word + place + (f" {self.detail}" if self.detail else "")
        word = self.kind.name.lower()
        size = f", {_in_bytes(self.size)}" if self.size else ""
        if self.peer >= 0:
            return f"{word} {'to' if self.kind == Kind.SEND else 'from'} rank {self.peer} over {self.group}{size}"
        return f"{word} {self.within} over {self.group}{size}"


@dataclass(frozen=True)
class RankView:
    """State of a rank, from its file and from the system.

    Attributes:
        rank: global rank.
        pid: process id; 0 if the rank never came.
        state: state that the rank itself wrote; ``None`` if the rank never came.
        error: error that ended the run, if any.
        host: name of its host.
        device: its device, as torch prints it.
        begun: time of the begin of its run.
        since: time of the begin of its state.
        beat: time of its last sign of life.
        process: state of its process, from this host's system or as another rank noted it.
        under_way: nested unfinished actions, the outermost first; for a failed rank, those where the error was raised.
        last: its last actions in order, the newest last.
        groups: ranks of its groups, by name.
        begun_in: number of collectives that it has begun in each group, by name.
        world_size: ranks of the job.
        runs_ahead: True if a wait for a collective does not block this rank's host, but only its device.
        timeout: limit for a collective, in seconds; 0 if it is not known.
    """

    rank: int
    pid: int = 0
    state: State | None = None
    error: str = ""
    host: str = ""
    device: str = ""
    begun: int = 0
    since: int = 0
    beat: int = 0
    process: Process = field(default_factory=lambda: Process(ProcessState.RUNNING))
    under_way: tuple[Record, ...] = ()
    last: tuple[Record, ...] = ()
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    begun_in: Mapping[str, int] = field(default_factory=dict)
    world_size: int = 0
    runs_ahead: bool = False
    timeout: float = 0.0

    @property
    def is_dead(self) -> bool:
        """True if its process ended before its run was over."""
        return self.state == State.RUNNING and self.process.state in (ProcessState.DEAD, ProcessState.ENDED_BY_LAUNCHER)

    @property
    def is_stopped(self) -> bool:
        """True if its process is stopped during its run."""
        return self.state == State.RUNNING and self.process.state == ProcessState.STOPPED

    @property
    def is_alive(self) -> bool:
        """True if its process is running."""
        return self.state is not None and self.process.state == ProcessState.RUNNING

    @property
    def waits_in(self) -> Record | None:
        """Innermost collective, message or rendezvous in which it waits; ``None`` if it does not wait."""
        return next((record for record in reversed(self.under_way) if record.waits), None)

    @property
    def active(self) -> int:
        """Time of its last action."""
        newest = self.last[-1:]
        return max([self.begun, *(max(r.begun, r.waiting, r.ended) for r in (*newest, *self.under_way))])

    def reached(self, group: str) -> int:
        """Number of collectives that it has started in a group."""
        known = [record.within for record in self.last if record.group == group and record.peer < 0]
        return max([self.begun_in.get(group, 0), *known])

    def exchanged(self, kind: Kind, group: str, peer: int) -> int | None:
        """Number of messages of a kind that it has started with a peer; ``None`` if its last actions do not tell."""
        known = [
            record.within for record in self.last if (record.kind, record.group, record.peer) == (kind, group, peer)
        ]
        return max(known, default=None if len(self.last) >= file_format.LAST else 0)


def read_run(folder: Path, live: bool = True) -> list[RankView]:
    """Read all ranks of a run; the result includes those that never came.

    Args:
        live: True to ask the system about processes on this host; False to use only the files.
    """
    found = [int(path.stem) for path in _rank_files(folder) if path.stem.isdigit()]
    views = {rank: view for rank in found if (view := read_rank(folder, rank, live)) is not None}
    newest = max((view.begun for view in views.values()), default=0)
    size = next((view.world_size for view in views.values() if view.begun == newest), 0)
    return [views.get(rank, RankView(rank)) for rank in range(size)]


def read_rank(folder: Path, rank: int, live: bool = True) -> RankView | None:
    """Read one rank; ``None`` if it has no file, or its file has another format. ``live`` as in :func:`read_run`."""
    try:
        raw = ring_path(folder, rank).read_bytes()
    except OSError:
        return None
    if len(raw) != file_format.FILE.itemsize or not raw.startswith(file_format.MAGIC):
        return None
    file = np.frombuffer(raw, file_format.FILE)[0]
    _, pid, own, size, number, begun, since, start, beat, (seen, _, status) = file["header"].item()
    about = _read_about(about_path(folder, rank))
    groups = {name: _ranks_of(ranks) for name, ranks in about.get("groups", ())}
    detail, error = (file[name].decode(errors="replace") for name in ("detail", "error"))
    state, host, device = State(number), str(about.get("host", "")), str(about.get("device", ""))
    under_way, last = _actions(file, ["", *groups], detail, has_failed=state in (State.RAISED, State.LOST))
    process = Process(ProcessState(seen), status or None) if seen else Process(ProcessState.RUNNING)
    begun_in = dict(zip(groups, file["threads"]["counts"].sum(0).tolist()[1:], strict=False))
    if live and host in ("", socket.gethostname()):
        process = _inspected(pid, start, process)
    whole = own, pid, state, error, host, device, begun, since, beat, process, under_way, last, groups, begun_in, size
    return RankView(*whole, bool(about.get("runs_ahead")), float(about.get("timeout", 0)))


def _read_about(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found


def _actions(file: Any, names: list[str], detail: str, *, has_failed: bool) -> tuple[tuple[Record, ...], ...]:
    """Unfinished actions (for a failed rank, those where the error was raised), and the last actions in order."""
    rings = [_records(thread["ring"], names, detail) for thread in file["threads"]]
    last = [record for ring in rings for record in ring]
    under_way = [
        record
        for thread, ring in zip(file["threads"], rings, strict=True)
        for record in _records(thread["stack"], names, detail, ring)
    ]
    if has_failed:
        failed = _records(file["failed"], names, detail, last)
        under_way = [replace(record, ended=0) for record in failed] or under_way
    return tuple(under_way), tuple(sorted(last, key=lambda record: record.begun))


def _inspected(pid: int, start: int, noted: Process) -> Process:
    """State of a process on this host; the note of another rank wins if it says more than the system does."""
    if noted.state not in (ProcessState.RUNNING, ProcessState.STOPPED):
        return noted
    found = inspect_process(pid, start)
    is_hidden = found.state == ProcessState.RUNNING and not _is_there(pid)
    return noted if is_hidden and noted.state == ProcessState.STOPPED else found


class FailureProbe:
    """Cheap, repeatable check of one rank for failure, which reads only the header of its file in the run's folder.

    The file of a rank on this host is shared memory and stays open: a shared file system is not asked again.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank = rank
        self._path, self._about = ring_path(folder, rank), about_path(folder, rank)
        self._pid, self._is_here = 0, False
        self._file: BinaryIO | None = None

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _header(self) -> bytes:
        if self._file is not None and not os.fstat(self._file.fileno()).st_nlink:
            self.close()  # another file has taken its name
        if self._file is None:
            self._file = open(self._path, "rb", buffering=0)  # noqa: SIM115 - closed by `close`
        return os.pread(self._file.fileno(), file_format.HEADER.itemsize, 0)

    def has_failed(self) -> bool:
        """True if its run has ended in an error, or its process has ended before the run."""
        try:
            raw = self._header()
        except OSError:
            return False
        finally:
            if not self._is_here:
                self.close()
        if len(raw) < file_format.HEADER.itemsize:
            return False
        _, pid, _, _, state, _, _, start, *_ = np.frombuffer(raw, file_format.HEADER)[0].item()
        if state != State.RUNNING:
            return state in (State.RAISED, State.LOST)
        if pid != self._pid:
            if not (about := _read_about(self._about)):
                return False  # it has only just started
            self._pid, self._is_here = pid, about.get("host") == socket.gethostname()
        return self._is_here and inspect_process(pid, start).state == ProcessState.DEAD


def _is_there(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def _records(stored: np.ndarray, names: list[str], detail: str, ring: Sequence[Record] = ()) -> list[Record]:
    """Actions in an array of the file.

    Args:
        stored: array of the file.
        names: names of groups, by number.
        detail: detail in the file.
        ring: actions of the ring, to look up entries that store only a number.
    """
    whole = {record.number: record for record in ring}
    found = []
    for number, begun, waiting, ended, size, within, step, microbatch, peer, kind, group, stage, has in stored.tolist():
        if not number:
            continue
        if number in whole:
            found.append(whole[number])
        elif begun and kind in Kind._value2member_map_:
            name = names[group] if group < len(names) else f"group {group}"
            rest = size, within, step, microbatch, peer, name, stage, detail if has else ""
            found.append(Record(number, Kind(kind), begun, waiting, ended, *rest))
    return found


def _ranks_of(ranks: Any) -> tuple[int, ...]:
    if isinstance(ranks, dict):
        first, step, count = int(ranks["first"]), int(ranks["step"]), int(ranks["count"])
        return tuple(range(first, first + step * count, step))
    return tuple(int(rank) for rank in ranks)


def _in_bytes(size: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"


def runs_below(folder: Path) -> list[Path]:
    """Folders of the runs in a directory, the newest first.

    Args:
        folder: folder of a run or of all runs, or the ``default_root_dir`` above them.
    """
    if _rank_files(folder):
        return [folder]
    inside = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    written: dict[Path, float] = {}
    with suppress(FileNotFoundError):  # the last run has ended, and the folder is gone
        for path in inside.glob("run-*"):
            if (time := last_written(path)) is not None:
                written[path] = time
    return sorted(written, key=lambda path: written[path], reverse=True)


def last_written(run: Path) -> float | None:
    """Time of the last write to a rank's file, in seconds since the epoch; ``None`` for a folder without such files."""
    times = []
    for file in _rank_files(run):
        with suppress(FileNotFoundError):
            times.append(file.stat().st_mtime)
    return max(times, default=None)


def _rank_files(run: Path) -> list[Path]:
    """Files of ranks in a run's folder; none if another process removes the folder meanwhile."""
    with suppress(FileNotFoundError):
        return list(run.glob("[0-9]*.actions"))
    return []


FOLDER = ".actions"
"""Folder of the files below a Trainer's ``default_root_dir``."""
