"""Folders that are not the same on all machines, or cannot be written; each rank a thread with a host of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer.states import TrainerFn
from patience import PATIENCE
from torch.distributed import HashStore

from lightning_megatron import KillSwitch, MegatronStrategy
from lightning_megatron.errors import ConfigError
from lightning_megatron.lightning.comparison import places as module
from lightning_megatron.lightning.comparison.places import PlaceProbe, RunFolder, places_of


def probe(each: list[list[RunFolder]], hosts: list[str], may_differ: tuple[str, ...] = ()) -> list[str]:
    """Error of every rank; empty for none."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=PATIENCE))
    said = [""] * len(each)

    def one(rank: int) -> None:
        try:
            PlaceProbe(store, rank, len(each), may_differ, hosts[rank]).compare(each[rank])
        except ConfigError as error:
            said[rank] = str(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(each))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    return said


def result(path: Path, **how: bool) -> list[RunFolder]:
    return [RunFolder("trainer.default_root_dir", str(path), **how)]


def test_a_shared_folder_passes_and_nothing_stays_in_it(tmp_path: Path) -> None:
    assert probe([result(tmp_path)] * 3, ["a", "b", "c"]) == [""] * 3
    assert probe([result(tmp_path / "not" / "there")] * 2, ["a", "b"]) == [""] * 2
    assert list(tmp_path.iterdir()) == []


def test_one_machine_with_the_same_paths_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError("written")

    monkeypatch.setattr(PlaceProbe, "_written_marks", refused)
    assert probe([result(tmp_path)] * 2, ["a", "a"]) == ["", ""]


@pytest.mark.parametrize("exists", [True, False])
def test_a_rank_with_another_folder_is_named_with_folder_and_host(tmp_path: Path, exists: bool) -> None:
    folders = [tmp_path / "one" / "run", tmp_path / "two" / "run"]
    for folder in folders:
        (folder if exists else folder.parent).mkdir(parents=True)
    said = probe([result(folders[0]), result(folders[0]), result(folders[1])], ["node1 x", "node1 x", "node2 y"])
    assert said[0] == said[1] == said[2]
    for words in (str(folders[1]), "rank 2 on node2", "rank 0 has on node1", "share"):
        assert words in said[0]
    assert "rank 1" not in said[0]
    assert probe([result(folders[0]), result(folders[1])], ["a", "b"], ("trainer.default_*",)) == ["", ""]


def test_a_rank_waits_once_for_all_of_its_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with many folders on another file system is refused as soon as one with a single folder."""
    ends: list[float] = []

    def comes_true(holds: Callable[[], bool], end: float) -> bool:
        ends.append(end)
        return holds()

    monkeypatch.setattr(module, "comes_true", comes_true)
    folders = {name: (tmp_path / "one" / name, tmp_path / "two" / name) for name in ("logs", "saved")}
    each = [[RunFolder(name, str(paths[rank])) for name, paths in folders.items()] for rank in range(2)]
    for pair in folders.values():
        for folder in pair:
            folder.mkdir(parents=True)
    said = probe(each, ["a", "b"])
    assert all(name in said[0] for name in folders)
    assert len(ends) == 2
    assert len(set(ends)) == 1


def test_one_folder_under_two_names_is_one(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").symlink_to("one")
    assert probe([result(tmp_path / "one" / "run"), result(tmp_path / "two" / "run")], ["a", "b"]) == ["", ""]


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write everywhere, so the system's answer is made up."""

    def made(prefix: str, dir: Path) -> TemporaryDirectory[str]:
        if dir == tmp_path / "locked":
            raise PermissionError(13, "Permission denied")
        return TemporaryDirectory(prefix=prefix, dir=dir)

    monkeypatch.setattr(module, "TemporaryDirectory", made)
    (tmp_path / "locked").mkdir()
    said = probe([result(tmp_path / "locked")] * 2, ["a", "a"])
    assert said[0] == said[1]
    place = f"there: Permission denied ({tmp_path / 'locked'})"
    assert f"cannot be written {place} (rank 0 on a, rank 1 on a)" in said[0]
    assert f"cannot be made {place}" in probe([result(tmp_path / "locked" / "run")] * 2, ["a", "a"])[0]
    # Logs are written by rank 0, and a cache that is full already is read.
    alone = RunFolder("CSVLogger.save_dir", str(tmp_path / "locked"), is_shared=False, first_alone=True)
    assert probe([[], [alone]], ["a", "b"]) == ["", ""]
    cache = RunFolder("data.cache_dir", str(tmp_path / "locked"), is_shared=False)
    assert "data.cache_dir" in probe([[cache]] * 2, ["a", "a"])[1]
    (tmp_path / "locked" / "index.npy").touch()
    assert probe([[cache]] * 2, ["a", "a"]) == ["", ""]


def test_a_file_system_that_does_not_answer_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = threading.Event()
    before = module.nearest_parent
    monkeypatch.setattr(module, "ANSWERS_WITHIN", 0.1)
    monkeypatch.setattr(module, "SEEN_WITHIN", 0.1)

    def answers(path: str) -> tuple[Path, str]:
        if "dead" in path:
            waits.wait(PATIENCE)
        return before(path)

    monkeypatch.setattr(module, "nearest_parent", answers)
    said = probe([result(tmp_path / "live"), result(tmp_path / "dead")], ["a", "b"])
    waits.set()
    assert said[0] == said[1]
    assert "rank 1 on b" in said[0]
    assert "does not answer" in said[0]


def test_the_places_of_a_run(tmp_path: Path) -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=MegatronStrategy(),
        default_root_dir=tmp_path,
        logger=CSVLogger(tmp_path / "logs"),
        callbacks=[ModelCheckpoint(tmp_path / "saved"), KillSwitch(tmp_path / "switch" / "stop")],
    )
    assert places_of(trainer) == []
    trainer.state.fn = TrainerFn.FITTING
    found = {place.name: (place.path, place.is_shared, place.first_alone) for place in places_of(trainer)}
    assert found == {
        "trainer.default_root_dir": (str(tmp_path), True, False),
        "ModelCheckpoint.dirpath": (str(tmp_path / "saved"), True, False),
        "KillSwitch.path": (str(tmp_path / "switch"), True, True),
        "CSVLogger.save_dir": (str(tmp_path / "logs"), False, True),
    }
    assert socket.gethostname() in module.view_of_files()
