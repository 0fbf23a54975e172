"""``ckpt_path="last"`` never means step 0 beside checkpoints, and two jobs never save in one folder."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from test_checkpoint_callbacks import At, train

from lightning_megatron import MegatronStrategy
from lightning_megatron.checkpoint import CheckpointError, verify
from lightning_megatron.checkpoint.dcp import fragments as dcp
from lightning_megatron.checkpoint.directory.atomic_dir import place_for
from lightning_megatron.checkpoint.directory.folder_lock import FolderInUseError, FolderLock
from lightning_megatron.checkpoint.integrity.manifest import Progress, read_manifest, records
from lightning_megatron.checkpoint.select.newest import Candidate, newest_good
from lightning_megatron.lightning.checkpointing.run_folders import patience
from lightning_megatron.testing.trainer import quiet_trainer

TP2 = {"tp": 2}


def last(folder: Path, *callbacks: Callback, **options: Any) -> tuple[Any, list[str]]:
    """Losses of a run that goes on from the last one, or the error; and the warnings of this rank."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found: Any = train(folder, TP2, *callbacks, ckpt_path="last", **options)
        except CheckpointError as error:
            found = str(error)
    return found, [str(w.message) for w in caught if "newest good" in str(w.message) or "scratch" in str(w.message)]


def deleted(folder: Path) -> None:
    shutil.rmtree(folder / "last.ckpt")


def dangling(folder: Path) -> None:
    shutil.rmtree(folder / "last.ckpt")
    (folder / "last.ckpt").symlink_to("step=8.ckpt")


def empty(folder: Path) -> None:
    shutil.rmtree(folder / "last.ckpt")
    (folder / "last.ckpt").mkdir()


def older(folder: Path) -> None:
    """A kill while ``last.ckpt`` was written; then a copy, all files of which are new."""
    shutil.rmtree(folder / "last.ckpt")
    shutil.copytree(folder / "step=4.ckpt", folder / "last.ckpt")
    for number, name in enumerate(("step=6.ckpt", "step=4.ckpt", "step=2.ckpt", "last.ckpt")):
        os.utime(folder / name / "manifest.json", (number, number))
        os.utime(folder / name, (number, number))


def halved(folder: Path) -> None:
    """A file of the newest two is lost."""
    for name in ("last.ckpt", "step=6.ckpt"):
        (folder / name / "__1_0.distcp").unlink()


def test_last_goes_on_from_the_newest_good_step_whatever_became_of_last(ranks, tmp_path):
    whole = ranks(2, train, tmp_path / "whole", TP2)[0]
    for spoil in (deleted, dangling, empty, older, halved):
        folder = tmp_path / spoil.__name__
        shutil.copytree(tmp_path / "whole", folder)
        spoil(folder)
        (losses, told), (others, silent) = ranks(2, last, folder, max_steps=6)
        assert losses == others == whole[4 if spoil is halved else 6 :], spoil.__name__
        assert len(told) == (spoil not in (deleted, older)), "what is passed over is told once"
        assert silent == []


def test_where_none_is_good_the_run_does_not_begin_anew_and_says_what_is_wrong_with_each(ranks, tmp_path):
    ranks(2, train, tmp_path, TP2)
    for path in tmp_path.iterdir():
        (path / "__0_0.distcp").unlink()
    for error, _ in ranks(2, last, tmp_path):
        assert error.startswith('ckpt_path="last": there are checkpoints in ')
        for name in ("last", "step=2", "step=4", "step=6"):
            assert f"{tmp_path / name}.ckpt: __0_0.distcp: missing" in error
        assert "ckpt_path=None" in error
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    (tmp_path / "last.ckpt").symlink_to("step=2.ckpt")
    assert "which does not exist" in ranks(2, last, tmp_path)[0][0]


def test_a_first_run_begins_and_so_does_one_after_a_kill_in_the_first_save(ranks, tmp_path):
    assert len(ranks(2, last, tmp_path / "new")[0][0]) == 6
    folder = tmp_path / "killed"
    place_for(folder / "step=2.ckpt", "saving").mkdir(parents=True)
    (folder / "last.ckpt").symlink_to("step=2.ckpt")
    (losses, told), _ = ranks(2, last, folder)
    assert len(losses) == 6
    assert "starts from scratch" in told[0]
    assert verify(folder / "last.ckpt") == []


class Slashed(BoringModel):
    first: int | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.first = self.global_step if self.first is None else self.first
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", super().validation_step(batch, batch_idx)["x"])


def begins_at(folder: Path, steps: int, **names: Any) -> int | None:
    saver = ModelCheckpoint(folder, monitor="val/loss", save_top_k=-1, **names)
    options = {"max_steps": steps, "val_check_interval": 2, "limit_val_batches": 1, "enable_checkpointing": True}
    quiet_trainer(MegatronStrategy(), callbacks=[saver], **options).fit(model := Slashed(), ckpt_path="last")
    return model.first


@pytest.mark.filterwarnings("ignore:Checkpoint directory", "ignore:The dirpath has changed")
@pytest.mark.parametrize("names", [
    {"filename": "{step}-{val/loss:.3f}"},
    {"filename": "at{step}/deep/model", "auto_insert_metric_name": False},
    {"filename": "{step}/{val/loss:.2f}", "save_last": "link"},
])  # fmt: skip
def test_last_finds_names_with_a_slash_and_never_begins_anew_beside_them(tmp_path, names):
    begins_at(tmp_path, 4, **names)
    assert begins_at(tmp_path, 6, **names) == 4
    assert begins_at(tmp_path, 8, filename="{step}") == 6, "whatever names are given now"
    step_8 = tmp_path / "step=8.ckpt"
    place = place_for(tmp_path / "inner" / "step=8.ckpt", "replaced")
    place.parent.mkdir(parents=True)
    step_8.rename(place)  # a kill while it was being replaced
    assert begins_at(tmp_path, 10, filename="{step}") == 8
    for manifest in tmp_path.rglob("manifest.json"):
        manifest.unlink()
    with pytest.raises(CheckpointError, match="there are checkpoints in"):
        begins_at(tmp_path, 12, **names)


@pytest.mark.filterwarnings("ignore:Checkpoint directory", "ignore:The dirpath has changed")
def test_last_follows_links_to_where_folders_have_been_moved(tmp_path):
    begins_at(tmp_path / "run", 4, filename="{step}/model")
    (tmp_path / "run" / "step=4").rename(tmp_path / "moved")
    (tmp_path / "run" / "step=4").symlink_to(tmp_path / "moved")
    (tmp_path / "run" / "itself").symlink_to(tmp_path / "run")
    assert begins_at(tmp_path / "run", 6, filename="{step}/model") == 4


def test_a_file_of_stock_lightning_that_may_be_newer_is_named(tmp_path):
    ours, file = Candidate(tmp_path / "a.ckpt", Progress(1, 4)), Candidate(tmp_path / "b.ckpt", Progress(0, 6))
    best, passed = newest_good([ours, file])
    assert best is ours
    assert [(one.path, "more steps" in one.reason) for one in passed] == [(file.path, True)]
    assert newest_good([Candidate(tmp_path / "c.ckpt", Progress(1, 6)), file])[1] == []


# What is newer


def generations(folder: Path) -> dict[str, Progress | None]:
    return {path.name: read_manifest(path).progress for path in sorted(folder.iterdir())}


def test_a_run_that_begins_again_is_newer_than_what_was_there(ranks, tmp_path):
    whole = ranks(2, train, tmp_path, TP2)[0]
    assert set(generations(tmp_path).values()) == {Progress(1, 2), Progress(1, 4), Progress(1, 6)}
    ranks(2, train, tmp_path, TP2, max_steps=2)  # anew, beside them
    assert generations(tmp_path)["step=2-v1.ckpt"] == Progress(2, 2)
    assert ranks(2, last, tmp_path, max_steps=4)[0][0] == whole[2:4]
    assert generations(tmp_path)["step=4-v1.ckpt"] == Progress(2, 4), "it goes on with that"
    # Back to an older one, by its path: what follows is newer than what was left.
    ranks(2, train, tmp_path, TP2, ckpt_path=str(tmp_path / "step=2.ckpt"), max_steps=4)
    assert generations(tmp_path)["step=4-v2.ckpt"] == Progress(3, 4)


class Fails(Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3:
            raise RuntimeError("on purpose")


def test_what_an_exception_left_counts_too(ranks, tmp_path):
    ranks(2, fails, tmp_path)
    assert read_manifest(tmp_path / "on_exception.ckpt").progress == Progress(1, 3)
    losses = ranks(2, train, tmp_path / "run", TP2, OnExceptionCheckpoint(tmp_path))[0]
    assert len(losses) <= 3, "without being asked, as in Lightning"


def fails(folder: Path) -> None:
    with pytest.raises(RuntimeError, match="on purpose"):
        train(folder / "run", TP2, Fails(), OnExceptionCheckpoint(folder))


# Two jobs


def refused(folder: Path, ckpt_path: str | None) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_megatron.lightning.checkpointing.run_folders.PATIENCE", 0.5)
        with pytest.raises(FolderInUseError) as error:
            train(folder, TP2, ckpt_path=ckpt_path)
    assert train.losses == []  # type: ignore[attr-defined]
    return str(error.value)


def test_a_second_job_is_refused_on_all_ranks_before_its_first_step_by_name(ranks, tmp_path):
    lock = FolderLock(tmp_path)
    lock.take()
    for ckpt_path in (None, "last"):
        for error in ranks(2, refused, tmp_path, ckpt_path):
            assert f"{tmp_path} is in use" in error
            assert f"process {os.getpid()} on " in error
            assert "another dirpath" in error
    lock.release()
    assert len(ranks(2, train, tmp_path, TP2)[0]) == 6
    assert not (tmp_path / ".unfinished").exists()


def test_who_was_started_again_waits_too_but_not_longer_than_ranks_wait_for_each_other():
    ten, one = timedelta(minutes=10), timedelta(minutes=1)
    assert patience(ten, goes_on=False, variables={}) == 0
    assert patience(ten, goes_on=False, variables={"SLURM_RESTART_COUNT": "0"}) == 0
    assert patience(ten, goes_on=False, variables={"SLURM_RESTART_COUNT": "1"}) == 150
    assert patience(ten, goes_on=True, variables={}) == 150
    assert patience(one, goes_on=True, variables={"TORCHELASTIC_RESTART_COUNT": "2"}) == 30


class Meanwhile(Callback):
    """Another run, which saves while this one starts."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        self.checkpoint, self.folder = checkpoint, folder

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if trainer.is_global_zero:
            shutil.copytree(self.checkpoint, self.folder / self.checkpoint.name)


def test_a_run_that_found_no_last_checkpoint_does_not_begin_anew_beside_one_that_came_since(ranks, tmp_path):
    ranks(2, train, tmp_path / "other", TP2, max_steps=2)
    saved = tmp_path / "other" / "step=2.ckpt"
    for error, _ in ranks(2, last, tmp_path / "run", Meanwhile(saved, tmp_path / "run")):
        assert f"{tmp_path / 'run' / 'step=2.ckpt'} has been saved since this run looked" in error


def loses_its_folder(folder: Path) -> str:
    def steal(trainer: Any, module: Any) -> None:
        other = FolderLock(folder)
        other.take()

    with pytest.raises(CheckpointError) as error:
        train(folder, TP2, At(3, steal, 0))
    return str(error.value)


def test_a_job_whose_folder_was_taken_saves_no_more(ranks, tmp_path):
    for error in ranks(2, loses_its_folder, tmp_path):
        assert "another run has taken" in error
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {"step=2.ckpt", "last.ckpt"}


def test_no_folder_stays_of_a_run_that_saves_nothing(tmp_path):
    saver = ModelCheckpoint(tmp_path / "run", save_top_k=0)
    trainer = quiet_trainer(MegatronStrategy(), max_steps=1, callbacks=[saver], enable_checkpointing=True)
    trainer.fit(BoringModel())
    assert list(tmp_path.iterdir()) == []


# A file that is lost


def loses_a_file(folder: Path) -> str:
    def lose_and_hash(directory: Path, files: Mapping[str, int]) -> Any:
        if "step=4" in directory.name and dist.get_rank() == 1:
            (directory / "__1_0.distcp").unlink()
        return records(directory, files)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp, "records", lose_and_hash)
        with pytest.raises(CheckpointError) as error:
            train(folder, TP2)
    return str(error.value)


def test_a_file_that_is_lost_before_it_is_hashed_fails_the_save(ranks, tmp_path):
    for error in ranks(2, loses_a_file, tmp_path):
        assert "rank 1: __1_0.distcp: missing or truncated after writing" in error
    assert {path.name for path in tmp_path.iterdir()} == {"step=2.ckpt", "last.ckpt"}
