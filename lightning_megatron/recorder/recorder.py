"""Recording the actions of a rank in a file that outlives it."""

from __future__ import annotations

import json
import mmap
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import time_ns
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from lightning_megatron.recorder import file_format
from lightning_megatron.recorder.file_format import Kind, State
from lightning_megatron.recorder.process import start_of

_RECORD, _TIME, _NUMBER = file_format.PACKED.pack_into, file_format.TIME.pack_into, file_format.NUMBER.pack_into
_SIZE, _LAST, _DEPTH = file_format.RECORD.itemsize, file_format.LAST, file_format.DEPTH
_NO_DEPTH = 15


class WaitClock(Protocol):
    """Clock that measures the time a thread waits for other ranks."""

    def begin_wait(self) -> None:
        """Start to measure a wait."""
        ...

    def end_wait(self) -> None:
        """Stop measuring a wait."""
        ...


class ActionLog:
    """Actions of one thread.

    Attributes:
        recorder: recorder that this log is a part of.
        step: optimizer steps taken so far; written with every action.
        microbatch: number of the micro-batch within the step; -1 for none.
        stage: pipeline stage that is running; -1 for none.
        clock: clock for waits; ``None`` if they are not timed.
        count: number of actions so far.
    """

    __slots__ = (
        "_counts",
        "_depth",
        "_messages",
        "_ring",
        "_stack",
        "_thread",
        "clock",
        "count",
        "microbatch",
        "recorder",
        "stage",
        "step",
    )

    def __init__(self, recorder: Recorder, thread: int) -> None:
        self.recorder = recorder
        self.step, self.microbatch, self.stage = 0, -1, -1
        self.clock: WaitClock | None = None
        self.write_to(recorder.file["threads"][thread])
        self.count = self._depth = 0
        self._messages: Counter[tuple[int, int, int]] = Counter()

    @property
    def waiting_since(self) -> int:
        """Time (``time.time_ns()``) since which this thread waits for other ranks or the device; 0 if it does not."""
        if not (depth := self._depth):
            return 0
        number = int(self._thread["stack"]["number"][depth - 1])
        record = self._thread["ring"][(number - 1) % _LAST].copy()  # a snapshot: another thread reads this property
        waits = record["kind"] >= Kind.ALL_REDUCE or record["kind"] in (Kind.RENDEZVOUS, Kind.DEVICE)
        return int(record["waiting"]) if waits and record["number"] == number and not record["ended"] else 0

    @property
    def active(self) -> int:
        """Time (``time.time_ns()``) of the last begin or end of an action."""
        return max(int(self._thread["ring"][name].max()) for name in ("begun", "waiting", "ended"))

    def write_to(self, thread: Any) -> None:
        """Switch to the part of another file that belongs to this thread."""
        self._thread = thread
        self._stack, self._ring = (memoryview(thread[name].view(np.uint8)) for name in ("stack", "ring"))
        self._counts = memoryview(thread["counts"])

    def begin(
        self, kind: int, group: int = 0, size: int = 0, peer: int = -1, waits: bool = True, detail: bool = False
    ) -> int:
        """Record the begin of an action.

        Args:
            group: number of the group of a collective; 0 for none.
            size: bytes to communicate.
            peer: source or destination rank of a message.
            waits: True for a blocking call, False for an asynchronous one.
            detail: True if the file's ``detail`` text belongs to this action.

        Returns:
            A token for :meth:`wait` and :meth:`end`.
        """
        number = self.count
        self.count = number + 1
        now = time_ns()
        within = 0
        if peer >= 0:
            within = self._messages[group, kind, peer] = self._messages[group, kind, peer] + 1
        elif group:
            within = self._counts[group] = self._counts[group] + 1
        at = number % _LAST * _SIZE
        waiting = now if waits else 0
        place = self.step, self.microbatch, peer, kind, group, self.stage, detail
        _RECORD(self._ring, at, number + 1, now, waiting, 0, size, within, *place)
        if not waits:
            return number << 4 | _NO_DEPTH
        depth = self._depth
        if depth >= _DEPTH:
            return number << 4 | _NO_DEPTH
        slot = depth * _SIZE
        if group:  # the number suffices: no action is nested in a collective, so its record stays in the ring
            _NUMBER(self._stack, slot, number + 1)
        else:
            self._stack[slot : slot + _SIZE] = self._ring[at : at + _SIZE]
        self._depth = depth + 1
        return number << 4 | depth

    def wait(self, token: int) -> int:
        """Record that this thread now waits for an asynchronous action; returns a token for :meth:`end`."""
        number, depth = token >> 4, self._depth
        if depth >= _DEPTH or self.count - number > _LAST:
            return token
        _TIME(self._ring, number % _LAST * _SIZE + file_format.WAITING_AT, time_ns())
        _NUMBER(self._stack, depth * _SIZE, number + 1)
        self._depth = depth + 1
        return number << 4 | depth

    def end(self, token: int) -> None:
        """Record the end of an action and of those nested in it."""
        number, depth = token >> 4, token & _NO_DEPTH
        if self.count - number <= _LAST:
            _TIME(self._ring, number % _LAST * _SIZE + file_format.ENDED_AT, time_ns())
        if depth != _NO_DEPTH:
            while self._depth > depth:
                self._depth -= 1
                _NUMBER(self._stack, self._depth * _SIZE, 0)

    def during(self, kind: int, detail: str = "") -> Span:
        """Context manager that records a phase; ``detail`` describes it further, such as by a path."""
        return Span(self, kind, detail)

    def keep_failed(self, error: BaseException) -> None:
        """Keep a copy of the unfinished actions if this error is new."""
        if self.recorder.is_new(error):
            self.recorder.file["failed"] = self._thread["stack"]

    def __reduce__(self) -> tuple[Any, ...]:
        return _fresh_log, ()


class Span:
    """Context manager for a phase of one thread."""

    __slots__ = ("_action_log", "_detail", "_kind", "_token")

    def __init__(self, action_log: ActionLog, kind: int, detail: str) -> None:
        self._action_log, self._kind, self._detail, self._token = action_log, kind, detail, 0

    def __enter__(self) -> None:
        if self._detail:
            self._action_log.recorder.detail(self._detail)
        self._token = self._action_log.begin(self._kind, detail=bool(self._detail))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self._action_log.keep_failed(error)
        self._action_log.end(self._token)


class Recorder:
    """The file of one rank; before it is opened and after it is closed, records go to memory only.

    Attributes:
        file: content of the file, as a structured array of dtype ``FILE``.
        main: log of the main thread, which includes the backward passes that it waits for.
        background: log of the thread that writes checkpoints in the background.
        folder: folder of the files of all ranks; ``None`` while no file is open.
        blame: function that takes the failed action and returns an error text that names the culprit.
    """

    def __init__(self) -> None:
        self.file: Any = _layout_of(bytearray(file_format.FILE.itemsize))
        self.main, self.background = (ActionLog(self, thread) for thread in range(file_format.THREADS))
        self.folder: Path | None = None
        self.blame: Callable[[str], str] | None = None
        self._rank = 0
        self._groups: dict[str, int] = {}
        self._about: dict[str, Any] = {"groups": []}
        self._failed: BaseException | None = None

    def group(self, name: str, ranks: Sequence[int]) -> int:
        """Number of a group of ranks; adds the group if its name is new. 0 once there are 60 groups."""
        if name not in self._groups and len(self._groups) < 60:
            self._groups[name] = len(self._groups) + 1
            self._about["groups"].append([name, _compressed(ranks)])
        return self._groups.get(name, 0)

    def open(self, folder: str | os.PathLike[str], rank: int, world_size: int) -> None:
        """Create the file of this rank, and the folder of the run if it is missing, and write to it from now on.

        Raises:
            OSError: if the file cannot be created.
        """
        self.close()
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        now = time_ns()
        self._rank = rank
        fresh = np.zeros((), file_format.FILE)
        ids = os.getpid(), rank, world_size, int(State.RUNNING)
        fresh["header"] = file_format.MAGIC, *ids, now, now, start_of(os.getpid()), now, (0, 0, 0)
        path = ring_path(folder, rank)
        with open(f"{path}.new", "w+b") as file:  # renamed when complete; readers of a stale file keep it
            file.write(fresh.tobytes())
            file.flush()
            os.replace(f"{path}.new", path)
            self._write_to(mmap.mmap(file.fileno(), file_format.FILE.itemsize))
        self.folder = folder
        self._failed = None

    def describe(self, about: Mapping[str, Any]) -> None:
        """Write a description of this rank beside its file, as JSON: host, device, groups."""
        self._about |= about
        if self.folder is not None:
            path = about_path(self.folder, self._rank)
            new = path.with_suffix(".new")
            new.write_text(json.dumps(self._about))
            os.replace(new, path)

    def detail(self, text: str) -> None:
        """Write the detail text of the action that begins next."""
        self.file["detail"] = file_format.as_text(text, "detail")

    def set_state(self, state: State, text: str = "") -> None:
        """Write the state in which the run of this rank has ended, and the text of its error, unless one is written."""
        if self.state == State.RUNNING:
            self.file["error"] = file_format.as_text(text, "error")
            self.file["header"]["since"] = time_ns()
            self.file["header"]["state"] = int(state)

    @property
    def state(self) -> State:
        """State of this rank's run."""
        return State(self.file["header"]["state"])

    @property
    def state_since(self) -> int:
        """Time of the last change of ``state``, from ``time.time_ns()``."""
        return int(self.file["header"]["since"])

    def beat(self) -> None:
        """Write a heartbeat: this process is alive."""
        self.file["header"]["beat"] = time_ns()

    def is_new(self, error: BaseException) -> bool:
        """True unless the error is, or was caused by, the last error passed to this method; remembers a new one."""
        cause: BaseException | None = error
        while cause is not None:
            if cause is self._failed:
                return False
            cause = cause.__cause__ or cause.__context__
        self._failed = error
        return True

    def close(self, remove: bool = False) -> None:
        """Close the file; ``remove`` deletes it, too."""
        folder, self.folder, self._failed = self.folder, None, None
        if folder is not None:
            self._write_to(bytearray(file_format.FILE.itemsize))
        if remove and folder is not None:
            for path in (ring_path(folder, self._rank), about_path(folder, self._rank)):
                path.unlink(missing_ok=True)

    def _write_to(self, buffer: bytearray | mmap.mmap) -> None:
        file = _layout_of(buffer)
        if isinstance(buffer, mmap.mmap):  # records from before the file was opened
            file["threads"] = self.file["threads"]
        self.file = file
        for action_log, thread in zip((self.main, self.background), file["threads"], strict=True):
            action_log.write_to(thread)

    def __reduce__(self) -> tuple[Any, ...]:
        return Recorder, ()  # a file belongs to one process


def _layout_of(buffer: bytearray | mmap.mmap) -> Any:
    return np.frombuffer(buffer, file_format.FILE)[0]


def _fresh_log() -> ActionLog:
    return Recorder().main


def ring_path(folder: Path, rank: int) -> Path:
    """Path of the file of a rank."""
    return folder / f"{rank:05}.actions"


def about_path(folder: Path, rank: int) -> Path:
    """Path of the description of a rank."""
    return folder / f"{rank:05}.json"


def note_process_state(folder: Path, rank: int, what: int, status: int) -> None:
    """Write the state of another rank's process into its file; later calls change nothing.

    Args:
        rank: the other rank.
        what: value of a :class:`~lightning_megatron.recorder.process.ProcessState`.
        status: exit status of the process, negative for a signal.
    """
    noted = np.array((what, time_ns(), status), file_format.PROCESS).tobytes()
    with suppress(OSError), open(ring_path(folder, rank), "r+b") as file:
        file.seek(file_format.PROCESS_AT)
        if file.read(4) == bytes(4):
            file.seek(file_format.PROCESS_AT)
            file.write(noted)


def _compressed(ranks: Sequence[int]) -> list[int] | dict[str, int]:
    """Encode equally spaced ranks as three numbers, since a group may have thousands."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if step and list(ranks) == list(range(ranks[0], ranks[0] + step * len(ranks), step)):
        return {"first": ranks[0], "step": step, "count": len(ranks)}
    return list(ranks)
