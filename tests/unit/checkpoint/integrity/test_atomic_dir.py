from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from lightning_megatron.checkpoint import remove
from lightning_megatron.checkpoint.directory import atomic_dir as publishing
from lightning_megatron.checkpoint.directory.atomic_dir import UNFINISHED
from lightning_megatron.checkpoint.directory.leftovers import recover, remove_stale
from lightning_megatron.testing.trainer import quiet_trainer


@pytest.fixture(params=["exchange", "two renames"])
def file_system(request, monkeypatch):
    """Both a system that can exchange two names in one step, and one that cannot."""
    if request.param == "two renames":
        monkeypatch.setattr(publishing, "swap_entries", lambda a, b: False)
    return request.param


def write(path, text):
    temporary = publishing.prepare(path)
    (temporary / "data").write_text(text)
    return temporary


def put(path, text):
    publishing.publish(write(path, text), path)


def test_the_name_appears_when_published_and_the_folder_of_unfinished_work_goes(tmp_path):
    path = tmp_path / "last.ckpt"
    temporary = write(path, "new")
    assert not path.exists()
    publishing.publish(temporary, path)
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.fixture
def happened(monkeypatch):
    """Syncs and new names in their order, by path. Power cannot fail on purpose; the order is what fsync(2) asks."""
    if not Path("/proc/self/fd").exists():
        pytest.skip("names of open files are read from /proc")
    events = []
    sync, rename, replace, swap = os.fsync, os.rename, os.replace, publishing.swap_entries

    def synced(fd):
        events.append(("sync", os.readlink(f"/proc/self/fd/{fd}")))
        sync(fd)

    def named(way):
        def note(a, b):
            done = way(a, b)
            if done is not False:
                events.append(("name", str(b)))
            return done

        return note

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", named(rename))
    monkeypatch.setattr(os, "replace", named(replace))
    monkeypatch.setattr(publishing, "swap_entries", named(swap))
    return events


@pytest.mark.parametrize("there", ["nothing", "a checkpoint", "a file", "a link"])
def test_entries_are_on_disk_before_the_name_and_the_name_before_the_end(tmp_path, file_system, happened, there):
    path = tmp_path / "last.ckpt"
    if there == "a checkpoint":
        put(path, "old")
    elif there == "a file":
        path.write_text("old")
    elif there == "a link":
        put(tmp_path / "step=1.ckpt", "old")
        path.symlink_to("step=1.ckpt")
    temporary = write(path, "new")
    happened.clear()
    publishing.publish(temporary, path)
    named = max(place for place, event in enumerate(happened) if event == ("name", str(path)))
    assert ("sync", str(temporary)) in happened[:named]
    assert ("sync", str(tmp_path)) in happened[named:]


@pytest.mark.parametrize("there", [False, True], ids=["first", "again"])
def test_the_bytes_of_one_file_are_on_disk_before_its_name(tmp_path, happened, there):
    """The file of a whole run, as ``save_distributed_checkpoint=False`` writes it."""
    path, strategy = tmp_path / "a.ckpt", MegatronStrategy(save_distributed_checkpoint=False)
    trainer = quiet_trainer(strategy, max_steps=1)
    trainer.fit(BoringModel(), DataLoader(RandomDataset(32, 2)))
    if there:
        trainer.save_checkpoint(path)
    happened.clear()
    trainer.save_checkpoint(path)
    assert path.is_file()
    named = max(place for place, event in enumerate(happened) if event == ("name", str(path)))
    assert any(what == "sync" and Path(file).parent.parent.name == UNFINISHED for what, file in happened[:named])
    assert ("sync", str(tmp_path)) in happened[named:]


def test_a_new_link_is_on_the_disk_before_the_end(tmp_path, happened):
    put(tmp_path / "step=1.ckpt", "old")
    happened.clear()
    publishing.relink(tmp_path / "last.ckpt", "step=1.ckpt")
    assert happened == [("name", str(tmp_path / "last.ckpt")), ("sync", str(tmp_path))]


def test_an_old_checkpoint_stays_until_the_new_one_is_published(tmp_path, file_system):
    path = tmp_path / "last.ckpt"
    for text in ("old", "new"):
        temporary = write(path, text)
        if text == "new":
            assert (path / "data").read_text() == "old"
        publishing.publish(temporary, path)
    assert (path / "data").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_file_and_a_link_of_that_name_are_replaced_too(tmp_path, file_system):
    path, target = tmp_path / "last.ckpt", tmp_path / "step=1.ckpt"
    path.write_text("a single-file checkpoint")
    put(path, "new")
    assert (path / "data").read_text() == "new"
    put(target, "target")
    remove(path)
    path.symlink_to(target, target_is_directory=True)
    put(path, "newer")
    assert not path.is_symlink()
    assert (target / "data").read_text() == "target"


def test_a_crash_between_the_two_renames_is_mended(tmp_path, monkeypatch):
    monkeypatch.setattr(publishing, "swap_entries", lambda a, b: False)
    path = tmp_path / "last.ckpt"
    put(path, "old")
    temporary = write(path, "new")
    rename, calls = publishing.os.rename, []

    def dies_at_the_second(a, b):
        calls.append((a, b))
        if len(calls) == 2:
            raise KeyboardInterrupt
        rename(a, b)

    monkeypatch.setattr(publishing.os, "rename", dies_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        publishing.publish(temporary, path)
    monkeypatch.setattr(publishing.os, "rename", rename)
    assert not path.exists()
    assert temporary.exists()
    recover(path)
    assert (path / "data").read_text() == "old"
    put(path, "newest")
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


def test_what_an_interrupted_save_left_is_cleared_by_the_next(tmp_path):
    path = tmp_path / "last.ckpt"
    (write(path, "half") / "more").write_text("stale")
    assert [p.name for p in write(path, "whole").iterdir()] == ["data"]
    assert len(list((tmp_path / publishing.UNFINISHED).iterdir())) == 1


def test_lightning_never_takes_unfinished_work_for_a_checkpoint(tmp_path):
    for name in ("last.ckpt", "hpc_ckpt_3.ckpt"):
        write(tmp_path / name, "half")
    assert not [p for p in tmp_path.rglob("*") if p.suffix == ".ckpt"]
    assert not [p for p in tmp_path.iterdir() if "ckpt" in p.name or p.name.startswith("last")]
    callback = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    assert callback._find_last_checkpoints(None) == set()


def test_remove_takes_the_name_away_before_the_content(tmp_path, monkeypatch):
    path = tmp_path / "step=1.ckpt"
    put(path, "x")

    def dies(going, *args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(publishing.shutil, "rmtree", dies)
        with pytest.raises(KeyboardInterrupt):
            remove(path)
    assert not path.exists()
    assert not list(tmp_path.glob("*.ckpt"))
    put(path, "again")
    remove(path)
    assert list(tmp_path.iterdir()) == []


def test_remove_of_a_file_a_link_and_nothing(tmp_path):
    file, link = tmp_path / "a.ckpt", tmp_path / "b.ckpt"
    file.write_text("x")
    link.symlink_to(file)
    remove(link)
    assert file.exists()
    remove(file)
    remove(tmp_path / "none.ckpt")
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_unfinished_work_may_be_tidied_away_at_any_moment(tmp_path):
    """By another thread, whenever it is empty: saves, removals and links begun meanwhile do not notice."""
    done = threading.Event()

    def tidy() -> None:
        while not done.is_set():
            with suppress(OSError):
                (tmp_path / publishing.UNFINISHED).rmdir()
            time.sleep(1e-4)

    other = threading.Thread(target=tidy)
    other.start()
    try:
        for number in range(200):
            path = tmp_path / f"{number}.ckpt"
            temporary = publishing.prepare(path)
            (temporary / "file").write_text("content")
            publishing.publish(temporary, path)
            publishing.relink(tmp_path / "last.ckpt", path.name)
            if number:
                publishing.remove(tmp_path / f"{number - 1}.ckpt")
            remove_stale(tmp_path)
    finally:
        done.set()
        other.join()
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {"last.ckpt", "199.ckpt"}
    assert (tmp_path / "last.ckpt" / "file").read_text() == "content"


def test_what_a_link_leads_to_is_not_removed(tmp_path):
    old, new = tmp_path / "old.ckpt", tmp_path / "new.ckpt"
    for path in (old, new):
        publishing.publish(publishing.prepare(path), path)
    (tmp_path / "last.ckpt").symlink_to("old.ckpt")
    assert publishing.remove_unlinked([old]) == [old]
    assert old.is_dir()
    publishing.relink(tmp_path / "last.ckpt", "new.ckpt")
    assert publishing.remove_unlinked([old]) == []
    assert not old.exists()
    assert new.is_dir()
