"""Checks of a run's folders from every machine, before the model is built."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_megatron.comm.rendezvous import Meeting, Store, comes_true
from lightning_megatron.config.layout import HasModelShape
from lightning_megatron.errors import Problem, raise_if_any
from lightning_megatron.files.free_space import readable
from lightning_megatron.lightning.comparison.compare import is_left_out

SEEN_WITHIN = 3.0
"""Seconds after which a file of another machine must be visible: network file systems cache that it was missing."""

ANSWERS_WITHIN = 1.5
"""Seconds in which a file system must answer: one that has lost its server never does."""

_MARK = ".lightning-megatron-probe"
_NO_ANSWER = ("folders of the run", "", "a file system does not answer, or not to this user")
T = TypeVar("T")


@dataclass(frozen=True)
class RunFolder:
    """A folder of a run.

    Attributes:
        name: name of the setting that gives it.
        path: absolute path on this machine.
        is_shared: True if all machines must see the same folder.
        first_alone: True if rank 0 alone writes there.
        needed: minimum size in bytes of a checkpoint there.
    """

    name: str
    path: str
    is_shared: bool = True
    first_alone: bool = False
    needed: int = 0


def places_of(trainer: Trainer | None, objects: Iterable[object] = ()) -> list[RunFolder]:
    """Folders that a fit will write to.

    Index files of data need not be shared, since each machine builds its own. Logs are rank 0's.

    Args:
        trainer: the Trainer; without one, and in runs other than a fit, there are no folders.
        objects: objects passed to the Trainer.
    """
    if trainer is None or trainer.fast_dev_run or trainer.state.fn != TrainerFn.FITTING:  # type: ignore[attr-defined]
        return []
    needed = {getattr(saver, "dirpath", None): _least_bytes(saver, objects) for saver in trainer.checkpoint_callbacks}
    found = _local("trainer.default_root_dir", trainer.default_root_dir, needed=needed.get(None, 0))
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        name, folder = type(callback).__name__, getattr(callback, "dirpath", None)
        if isinstance(callback, Checkpoint):
            found += _local(f"{name}.dirpath", folder, needed=needed[folder])
        elif name == "KillSwitch" and (path := getattr(callback, "path", None)) is not None:
            found += _local("KillSwitch.path", os.path.dirname(os.path.abspath(path)), first_alone=True)
    for logger in trainer.loggers:
        found += _local(f"{type(logger).__name__}.save_dir", logger.save_dir, is_shared=False, first_alone=True)
    attached = getattr(trainer, "datamodule", None)
    data = next((each for each in objects if isinstance(each, LightningDataModule)), attached)
    return found + _local("data.cache_dir", getattr(data, "cache_dir", None), is_shared=False)


def check_places(places: Iterable[RunFolder], *, is_first: bool) -> None:
    """Raise for every folder that this process cannot write, or that has too little free space."""
    tried = [place for place in places if not place.first_alone or (is_first and not place.is_shared)]
    faults = _in_time(
        lambda: [(place.name, place.path, write_fault(place, *nearest_parent(place.path))) for place in tried],
        [_NO_ANSWER],
    )
    raise_if_any(Problem(*fault) for fault in faults if fault[-1])


class PlaceProbe:
    """Finds folders that differ between machines, or cannot be written; ranks communicate through the store.

    Each rank writes a file into each folder, or into its nearest parent that exists, and removes it. Where ranks are on
    several machines or have different paths, every rank looks for the file of rank 0.

    Places of the names in ``may_differ`` are left out, see :func:`is_left_out`.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, may_differ: Sequence[str] = (), host: str | None = None
    ) -> None:
        self._meeting = Meeting(store, rank, world_size, "places")
        self._rank, self._may_differ = rank, tuple(may_differ)
        self._host = host or view_of_files()

    def compare(self, places: Sequence[RunFolder]) -> None:
        """Check the folders. Every rank must call this.

        Raises:
            ConfigError: on all ranks, with every folder at fault, its ranks and their machines.
        """
        kept = [p for p in places if not is_left_out(p.name, self._may_differ)]
        marks: list[Path] = []
        said = json.dumps([self._host, {place.name: place.path for place in kept}])
        verdict = json.loads(self._meeting.judged(said, lambda all_said: self._mark(all_said, kept, marks)))
        faults = _in_time(lambda: [*self._faults(kept, verdict)], [_NO_ANSWER])
        report = json.dumps([self._rank, self._host.split(" ")[0], faults])
        found = json.loads(self._meeting.judged(report, _judge))
        for mark in marks:
            with suppress(OSError):
                mark.unlink()
        if found:
            self._meeting.part()
            raise_if_any(Problem(name, path, reason) for name, path, reason in found)

    def _mark(self, said: Sequence[str], places: Sequence[RunFolder], marks: list[Path]) -> str:
        """Rank 0's files, by place, with the missing part of the path, as JSON; empty if all ranks are alike."""
        given = [json.loads(text) for text in said]
        if all(each == given[0] for each in given):
            return json.dumps({})
        return json.dumps(_in_time(partial(self._written_marks, places, marks), {}))

    def _written_marks(self, places: Sequence[RunFolder], marks: list[Path]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for place in places:
            if place.is_shared:
                parent, rest = nearest_parent(place.path)
                mark = parent / f"{_MARK}-{uuid.uuid4().hex}"
                with suppress(OSError):  # a folder that cannot be written is reported below
                    mark.touch()
                    marks.append(mark)
                    found[place.name] = [mark.name, rest, self._host.split(" ")[0]]
        return found

    def _faults(self, places: Sequence[RunFolder], marks: dict[str, list[str]]) -> Iterable[tuple[str, str, str]]:
        """Name, path and fault of each place on this machine."""
        end = time.monotonic() + SEEN_WITHIN
        for place in places:
            parent, rest = nearest_parent(place.path)
            if place.name in marks and self._rank > 0:
                name, missing, host = marks[place.name]
                parent, rest = _without(place.path, missing)
                if not comes_true((parent / name).exists, end):
                    reason = f"is not the folder that rank 0 has on {host}: what that has written is not visible here"
                    yield place.name, place.path, f"{reason}; it must be on a file system that all machines share"
                    continue
            if self._rank > 0 and place.first_alone:
                continue
            if fault := write_fault(place, parent, rest):
                yield place.name, place.path, fault


def view_of_files() -> str:
    """Name of this machine, and of its view of file systems: containers of one machine may mount other folders."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/mnt"))
    return " ".join(parts)


def nearest_parent(path: str) -> tuple[Path, str]:
    """The longest part of a path that exists, and the rest."""
    parent = Path(path)
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    rest = os.path.relpath(path, parent)
    return parent, "" if rest == os.curdir else rest


def write_fault(place: RunFolder, parent: Path, rest: str) -> str:
    """Reason why a folder, ``parent / rest``, cannot be written here; empty if it can. Nothing stays in ``parent``."""
    try:
        with TemporaryDirectory(prefix=f"{_MARK}-", dir=parent) as made:
            (Path(made) / "file").write_bytes(bytes(4096))
        free = shutil.disk_usage(parent).free
    except OSError as error:
        how = "cannot be made" if rest else "cannot be written"
        return "" if _holds_something(place) else f"{how} there: {error.strerror} ({parent})"
    too_small = f"a checkpoint takes at least {readable(place.needed)}, and {readable(free)} are free"
    return too_small if place.needed > free else ""


def _local(name: str, path: object, **how: Any) -> list[RunFolder]:
    """A folder in a file system of this machine; none for a URL, or where none is set."""
    if not isinstance(path, str | os.PathLike) or "://" in os.fspath(path):
        return []
    return [RunFolder(name, os.path.abspath(path), **how)]


def _least_bytes(saver: Callback, objects: Iterable[object]) -> int:
    """Minimum bytes of a checkpoint: 2 a parameter (16-bit weights), or 12 with AdamW's state of our modules."""
    whole = not getattr(saver, "save_weights_only", False)
    modules = ((12 if whole and isinstance(m, HasModelShape) else 2, m) for m in objects if isinstance(m, nn.Module))
    return sum(n * p.numel() for n, m in modules for p in m.parameters() if p.requires_grad and not is_lazy(p))


def _without(path: str, rest: str) -> tuple[Path, str]:
    """Split off the end of a path that is missing on another rank; the whole path if it ends differently."""
    parts, end = Path(path).parts, Path(rest).parts if rest else ()
    if end and parts[-len(end) :] == end:
        return Path(*parts[: -len(end)]), rest
    return Path(path), ""


def _holds_something(place: RunFolder) -> bool:
    """True for a cache that was filled before, and so is only read."""
    return place.name == "data.cache_dir" and os.path.isdir(place.path) and bool(os.listdir(place.path))


def _in_time(work: Callable[[], T], otherwise: Any) -> T:
    """The result of ``work``; ``otherwise`` if a file system fails or does not answer in time."""
    results: list[T] = []

    def run() -> None:
        with suppress(OSError):
            results.append(work())

    thread = threading.Thread(target=run, name="look-at-folders", daemon=True)
    thread.start()
    thread.join(ANSWERS_WITHIN + SEEN_WITHIN)
    return results[0] if results else otherwise


def _judge(said: Sequence[str]) -> str:
    """Arguments of a :class:`Problem` for each fault, with the ranks that have it, as JSON."""
    ranks: dict[tuple[str, str, str], list[str]] = {}
    for rank, host, faults in map(json.loads, said):
        for name, path, reason in faults:
            ranks.setdefault((name, path, reason), []).append(f"rank {rank} on {host}")
    return json.dumps(
        [
            (name, path, f"{reason} ({', '.join(of[:8])}{' and others' if len(of) > 8 else ''})")
            for (name, path, reason), of in ranks.items()
        ]
    )
