"""The newest good checkpoint of a folder, by what checkpoints say of themselves; and what dead runs have left there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.checkpoint import Progress, candidates, model_state, newest_good, remove_stale, save, verify
from lightning_megatron.checkpoint.directory.atomic_dir import UNFINISHED, place_for
from lightning_megatron.checkpoint.directory.leftovers import recover
from lightning_megatron.checkpoint.directory.owner import Owner
from lightning_megatron.checkpoint.integrity.manifest import Manifest, read_manifest
from lightning_megatron.mesh import ParallelMesh
from tests.forked import forked

MESH = ParallelMesh.single()


def saved(path: Path, step: int, generation: int | None = 1, **meta: Any) -> Path:
    progress = None if generation is None else Progress(generation, step)
    save(path, model_state({"x": torch.arange(7.0)}, {}, MESH), {"global_step": step, **meta}, MESH, progress=progress)
    return path


def found_in(folder: Path) -> tuple[str | None, list[str]]:
    best, passed = newest_good(candidates([(folder, ".ckpt")]))
    return None if best is None else best.path.name, [one.path.name for one in passed]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a run whose files have got other times, and whose link was not led on."""
    for number, step in enumerate((9, 6, 3)):
        manifest = saved(tmp_path / f"step={step}.ckpt", step) / "manifest.json"
        os.utime(manifest, (number, number))
    (tmp_path / "last.ckpt").symlink_to("step=6.ckpt")
    return tmp_path


def test_newer_is_what_has_come_further_whatever_the_times_of_files(folder: Path) -> None:
    assert found_in(folder) == ("step=9.ckpt", [])
    shutil.copytree(folder / "step=9.ckpt", folder / "last-v1.ckpt")
    assert found_in(folder) == ("last-v1.ckpt", []), "of equal ones that whose name says so"


def test_what_was_begun_later_is_newer_although_it_has_taken_fewer_steps(folder: Path) -> None:
    saved(folder / "step=3-v1.ckpt", 3, generation=2)
    assert found_in(folder) == ("step=3-v1.ckpt", [])


@pytest.mark.parametrize("how", ["a file is lost", "a file is cut", "no manifest", "an edited manifest", "empty"])
def test_a_damaged_one_is_passed_over_and_an_older_damaged_one_is_nobodys_business(folder: Path, how: str) -> None:
    for name in ("step=9.ckpt", "step=3.ckpt"):
        file, manifest = folder / name / "__0_0.distcp", folder / name / "manifest.json"
        if how == "a file is lost":
            file.unlink()
        elif how == "a file is cut":
            os.truncate(file, 10)
        elif how == "no manifest":
            manifest.unlink()
        elif how == "an edited manifest":
            manifest.write_text(manifest.read_text().replace('"tp": 1', '"tp": 2'))
        else:
            shutil.rmtree(folder / name)
            (folder / name).mkdir()
    unknown = ["step=3.ckpt"] if how in ("no manifest", "an edited manifest", "empty") else []
    assert found_in(folder) == ("last.ckpt", [*unknown, "step=9.ckpt"])


def test_a_link_to_nothing_is_damage_unless_what_it_leads_to_was_never_complete(folder: Path) -> None:
    lead = folder / "last.ckpt"
    for target, passed in (("step=12.ckpt", ["last.ckpt"]), ("step=15.ckpt", [])):
        lead.unlink()
        lead.symlink_to(target)
        place_for(folder / "step=15.ckpt", "saving").mkdir(parents=True, exist_ok=True)
        assert found_in(folder) == ("step=9.ckpt", passed)


def test_weights_alone_do_not_count_and_what_says_nothing_of_its_progress_is_asked_for_its_step(tmp_path: Path) -> None:
    saved(tmp_path / "weights.ckpt", 20, None)
    assert [one.state for one in candidates([(tmp_path, ".ckpt")])] == ["weights"]
    saved(tmp_path / "old.ckpt", 5, None, optimizer_states=[])
    torch.save({"global_step": 4, "optimizer_states": [], "state_dict": {}}, tmp_path / "file.ckpt")
    assert found_in(tmp_path) == ("old.ckpt", [])
    torch.save({"global_step": 6, "optimizer_states": [], "state_dict": {}}, tmp_path / "file.ckpt")
    assert found_in(tmp_path) == ("file.ckpt", [])
    (tmp_path / "file.ckpt").write_bytes(b"half")
    assert found_in(tmp_path) == ("old.ckpt", ["file.ckpt"])
    assert candidates([(tmp_path, ".ckpt")])[0].progress == Progress(0, 5)


def test_further_paths_are_looked_at_and_what_was_left_aside_comes_back(folder: Path, tmp_path: Path) -> None:
    beside = saved(tmp_path.parent / f"beside-{tmp_path.name}" / "on_exception.ckpt", 10)
    found = candidates([(folder, ".ckpt")], [beside, tmp_path / "none.ckpt"])
    assert found[0].path == beside
    os.rename(folder / "step=9.ckpt", made(place_for(folder / "step=9.ckpt", "replaced"), folder=False))
    assert found_in(folder) == ("step=9.ckpt", [])
    assert found_in(tmp_path / "nowhere") == (None, [])


def test_a_manifest_of_the_format_before_is_read_and_a_wrong_progress_is_a_fault(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.ckpt", 3)
    manifest = read_manifest(path)
    assert manifest.progress == Progress(1, 3)
    old = Manifest(manifest.layout, manifest.files, manifest.torch, version=2)
    assert Manifest.parse(old.render()) == old
    assert "progress" not in old.render()
    for text in (manifest.render().replace('"step": 3', '"step": "3"'), old.render().replace(": 2", ": 4")):
        with pytest.raises(ValueError, match=r"no progress|format version 4|digest"):
            Manifest.parse(text)


# What runs that died have left


def made(entry: Path, folder: bool = True) -> Path:
    entry.parent.mkdir(parents=True, exist_ok=True)
    if folder:
        entry.mkdir()
        (entry / "half").write_text("x")
    return entry


def mark_of_a_dead_process() -> str:
    ours, theirs = os.pipe()
    forked(lambda: os.write(theirs, Owner.own().mark().encode()))
    mark = os.read(ours, 1000).decode()
    os.close(ours)
    os.close(theirs)
    assert Owner.of_mark(mark) != Owner.own()
    return mark


def elsewhere() -> str:
    return f"beef-1-1-{os.getpid():x}"


def test_a_process_is_known_alive_dead_or_out_of_sight() -> None:
    dead, far, own = (Owner.of_mark(mark) for mark in (mark_of_a_dead_process(), elsewhere(), Owner.own().mark()))
    assert dead is not None
    assert far is not None
    assert own == Owner.own()
    assert (dead.is_alive, far.is_alive, own.is_alive) == (False, None, True)
    assert Owner(own.place, own.pid, own.started + 1).is_alive is False, "the number was given to another one"
    assert Owner.of_mark("../1-1-1") is None


def test_only_what_is_surely_dead_is_swept(tmp_path: Path) -> None:
    unfinished = tmp_path / UNFINISHED
    dead = made(unfinished / f"a.ckpt.{mark_of_a_dead_process()}.saving")
    far, old = made(unfinished / f"b.ckpt.{elsewhere()}.saving"), made(unfinished / "c.ckpt.saving")
    own = made(place_for(tmp_path / "d.ckpt", "saving"))
    (unfinished / "notes.txt").write_text("somebody's")
    assert remove_stale(tmp_path) == [dead.name], "by name, although it is fresh; the others have just been touched"
    os.utime(far / "half", (4e9, 4e9))  # in the year 2096
    assert remove_stale(tmp_path) == [far.name], "a clock was wrong: no sign of life"
    # A change of the inode counts as a sign of life and cannot be set back: no age can be feigned.
    assert remove_stale(tmp_path, dead_after=-1.0) == [old.name, own.name]
    assert [entry.name for entry in unfinished.iterdir()] == ["notes.txt"]
    (unfinished / "notes.txt").unlink()
    assert remove_stale(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_what_a_dead_run_left_aside_comes_back_and_of_a_live_one_it_does_not(tmp_path: Path) -> None:
    path = saved(tmp_path / "last.ckpt", 3)
    aside = made(tmp_path / UNFINISHED / f"last.ckpt.{mark_of_a_dead_process()}.replaced", folder=False)
    os.rename(path, aside)
    assert remove_stale(tmp_path) == [aside.name]
    assert verify(path) == []
    alive = Owner(Owner.own().place, os.getppid(), 0)
    assert alive.is_alive is False
    forked(lambda: place_for(path, "replaced").mkdir(parents=True))
    recover(path)
    assert verify(path) == []
