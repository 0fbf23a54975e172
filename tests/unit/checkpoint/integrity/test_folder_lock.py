"""One run at a time in a folder of checkpoints: who is refused, who waits, and whose lock is nobody's any more."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE

from lightning_megatron.checkpoint.directory import folder_lock
from lightning_megatron.checkpoint.directory.atomic_dir import UNFINISHED
from lightning_megatron.checkpoint.directory.folder_lock import FolderInUseError, FolderLock
from tests.forked import join

FORK = mp.get_context("fork")
Locks = Callable[[Path], FolderLock]


@pytest.fixture
def lock_of() -> Iterator[Locks]:
    """Makes locks, and lets go of them in the end: each gives signs of life until then, also where it has been lost."""
    made: list[FolderLock] = []

    def make(folder: Path) -> FolderLock:
        made.append(FolderLock(folder))
        return made[-1]

    yield make
    for lock in made:
        lock.release()


def note_in(folder: Path) -> Path:
    return folder / UNFINISHED / "lock" / "owner.json"


def holder(folder: Path, until: Connection | None = None, dies: bool = False) -> BaseProcess:
    """A process that has the folder, and ends when it is told to, or at once."""

    def hold() -> None:
        lock = FolderLock(folder)
        lock.take()
        if until is not None:
            until.recv()
        if not dies:
            lock.release()
        os._exit(0)

    process = FORK.Process(target=hold)
    process.start()
    deadline = time.monotonic() + PATIENCE
    while not note_in(folder).exists():
        if time.monotonic() > deadline:
            join(process, 0.0)
        time.sleep(0.001)
    return process


def pretend(folder: Path, **changes: object) -> None:
    """Let the lock that is there be somebody else's."""
    file = note_in(folder)
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_what_is_let_go_leaves_nothing_behind(tmp_path: Path) -> None:
    threads = threading.active_count()
    for folder in (tmp_path, tmp_path / "new" / "folder"):
        lock = FolderLock(folder)
        lock.take()
        assert lock.is_ours()
        lock.release()
        assert list(tmp_path.iterdir()) == []
    assert threading.active_count() <= threads  # one of an earlier test may end meanwhile


def test_another_run_is_refused_by_name_or_waits_and_says_so_once(tmp_path: Path) -> None:
    said: list[str] = []
    ours, theirs = FORK.Pipe()
    process = holder(tmp_path, theirs)
    with pytest.raises(FolderInUseError, match=rf"process {process.pid} on .* saves its checkpoints there.*dirpath"):
        FolderLock(tmp_path).take()
    with pytest.raises(FolderInUseError, match=r"in use:"):
        FolderLock(tmp_path).take(0.3, said.append)
    lock = FolderLock(tmp_path)
    lock.take(60.0, lambda text: (said.append(text), ours.send("let go")))
    assert len(said) == 2
    assert f"waiting up to 60 s for process {process.pid} on " in said[1]
    join(process)
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_a_dead_run_is_taken_at_once(tmp_path: Path, lock_of: Locks) -> None:
    join(holder(tmp_path, dies=True))
    lock = lock_of(tmp_path)
    lock.take()
    lock_of(tmp_path).take()  # as is that of a fit in this process which was left without its end
    assert not lock.is_ours(), "and that one learns it"


def beats_now(folder: Path) -> None: ...


def long_ago(folder: Path) -> None:
    os.utime(note_in(folder), (1e9, 1e9))


def in_the_future(folder: Path) -> None:
    os.utime(note_in(folder), (4e9, 4e9))


@pytest.mark.parametrize(("last_beat", "is_dead"), [(beats_now, False), (long_ago, True), (in_the_future, True)])
def test_a_run_out_of_sight_lives_by_its_beats(
    tmp_path: Path, lock_of: Locks, last_beat: Callable[[Path], None], is_dead: bool
) -> None:
    lock_of(tmp_path).take()
    pretend(tmp_path, mark="beef-1-1-1", job="Slurm job 7, process 1 on far")
    last_beat(tmp_path)
    lock = lock_of(tmp_path)
    if not is_dead:
        with pytest.raises(FolderInUseError, match=r"Slurm job 7, process 1 on far, whose last sign of life is \d+ s"):
            lock.take()
        return
    lock.take()
    assert lock.is_ours()


def test_a_lock_that_says_nothing_is_held_until_it_is_old(tmp_path: Path, lock_of: Locks) -> None:
    lock_of(tmp_path).take()
    note_in(tmp_path).write_text("")  # a machine went down before it was on the disk
    with pytest.raises(FolderInUseError, match="another run"):
        lock_of(tmp_path).take()
    long_ago(tmp_path)
    lock_of(tmp_path).take()
    note_in(tmp_path).unlink()
    os.utime(note_in(tmp_path).parent, (1e9, 1e9))
    (note_in(tmp_path).parent / "x").touch()
    os.utime(note_in(tmp_path).parent, (1e9, 1e9))
    lock_of(tmp_path).take()


def test_a_lock_that_comes_when_another_has_just_gone_is_looked_at_anew(
    tmp_path: Path, lock_of: Locks, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock_of(tmp_path).take()
    time_of = folder_lock.file_system_time

    def just_gone(folder: Path) -> float:
        monkeypatch.setattr(folder_lock, "file_system_time", time_of)
        raise FileNotFoundError(folder)

    monkeypatch.setattr(folder_lock, "file_system_time", just_gone)
    lock = lock_of(tmp_path)
    lock.take()
    assert lock.is_ours()


def test_a_new_lock_in_the_place_of_an_old_one_is_not_taken_for_it(
    tmp_path: Path, lock_of: Locks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old one goes, and the new one comes, between two looks at one lock."""
    lock_of(tmp_path).take()
    note = note_in(tmp_path)
    long_ago(tmp_path)
    os.utime(note.parent, (1e9, 1e9))
    open_ = Path.open

    def late(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path == note:
            monkeypatch.setattr(Path, "open", open_)
            note.parent.rename(tmp_path / "gone")
            note.parent.mkdir()
            shutil.copy(tmp_path / "gone" / note.name, note)
            pretend(tmp_path, mark="beef-1-1-1", job="another run")
            raise FileNotFoundError(path)
        return open_(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", late)
    with pytest.raises(FolderInUseError, match="another run"):
        lock_of(tmp_path).take()


def test_a_folder_that_cannot_be_is_no_reason_to_wait(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        FolderLock(tmp_path / "file").take(60.0)
    with pytest.raises(OSError, match="file"):
        FolderLock(tmp_path / "file" / "folder").take(60.0)


def test_a_run_gives_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "BEAT", 0.01)
    lock = FolderLock(tmp_path)
    lock.take()
    long_ago(tmp_path)
    while note_in(tmp_path).stat().st_mtime == 1e9:
        time.sleep(0.01)
    lock.release()


def test_a_run_that_has_lost_its_lock_gives_no_more_signs_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_lock, "BEAT", 0.01)
    lock = FolderLock(tmp_path)
    lock.take()
    thread = next(each for each in threading.enumerate() if each.name == f"keeping {tmp_path}")
    assert thread.is_alive()
    pretend(tmp_path, mark="beef-1-1-1", job="another run")
    thread.join(PATIENCE)
    assert not thread.is_alive()
    long_ago(tmp_path)
    lock.release()
    assert note_in(tmp_path).stat().st_mtime == 1e9


def test_of_many_that_find_a_dead_lock_one_has_the_folder_at_a_time(tmp_path: Path) -> None:
    folder, inside = tmp_path / "run", tmp_path / "inside"
    join(holder(folder, dies=True))

    def work() -> None:
        for _ in range(5):
            lock = FolderLock(folder)
            lock.take(120.0, lambda text: None)
            inside.mkdir()  # fails if somebody is there
            time.sleep(0.002)
            inside.rmdir()
            lock.release()
        os._exit(0)

    processes = [FORK.Process(target=work) for _ in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        join(process, 240.0)  # six take turns
    assert [process.exitcode for process in processes] == [0] * 6
    assert list(tmp_path.rglob("*")) == [folder]
