"""Folders that cannot be written, too small disks and checkpoints that are not there end a run at its start."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.loggers import CSVLogger

from lightning_megatron import MegatronStrategy
from lightning_megatron.errors import ConfigError, MissingCheckpointError
from lightning_megatron.testing.trainer import quiet_trainer


class Untouched(BoringModel):
    """A module that must not be reached."""

    def setup(self, stage: str) -> None:
        raise AssertionError("the run has begun")


class Huge(Untouched):
    """A module of more weights than any disk holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(torch.empty(10**16, device="meta"))


def trainer_in(folder: Path, **more: Any) -> Trainer:
    given: dict[str, Any] = {"enable_checkpointing": True, "logger": False, "default_root_dir": folder, "max_steps": 1}
    return quiet_trainer(MegatronStrategy(), **given | more)


FOLDERS: dict[str, Callable[[Path, Path], dict[str, Any]]] = {
    "ModelCheckpoint.dirpath": lambda good, bad: {"callbacks": [ModelCheckpoint(bad)]},
    "CSVLogger.save_dir": lambda good, bad: {"callbacks": [ModelCheckpoint(good)], "logger": CSVLogger(bad)},
    "trainer.default_root_dir": lambda good, bad: {"callbacks": [ModelCheckpoint(good)], "default_root_dir": bad},
}


@pytest.mark.parametrize("below", ["", "a/b"])
@pytest.mark.parametrize("name", list(FOLDERS))
def test_a_folder_that_cannot_be_written_is_named(name: str, below: str, tmp_path: Path) -> None:
    """Below a file, where root cannot write either."""
    (tmp_path / "file").touch()
    bad = tmp_path / "file" / below
    with pytest.raises(ConfigError) as caught:
        trainer_in(tmp_path, **FOLDERS[name](tmp_path / "good", bad)).fit(Untouched())
    (problem,) = caught.value.problems
    assert (problem.argument, problem.value) == (name, str(bad))
    how = "made" if below else "written"
    assert problem.reason == f"cannot be {how} there: Not a directory ({tmp_path / 'file'})"
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing was made, or all was removed"


def test_the_cache_of_data_is_tried(tmp_path: Path) -> None:
    class Data(BoringDataModule):
        cache_dir = str(tmp_path / "file")

    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cache_dir='.*file': cannot be written there"):
        trainer_in(tmp_path).fit(Untouched(), datamodule=Data())


def test_a_disk_that_is_too_small_for_one_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ModelCheckpoint\.dirpath='.*': a checkpoint takes at least .* GB"):
        trainer_in(tmp_path, callbacks=[ModelCheckpoint(tmp_path / "new")]).fit(Huge())
    with pytest.raises(ConfigError, match="takes at least"):
        trainer_in(tmp_path).fit(Huge())


def test_a_run_that_saves_nothing_needs_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(AssertionError, match="the run has begun"):
        trainer_in(tmp_path / "file", fast_dev_run=True).fit(Untouched())
    with pytest.raises(AssertionError, match="the run has begun"):
        trainer_in(tmp_path, enable_checkpointing=False).fit(Huge())
    with pytest.raises(AssertionError, match="the run has begun"):
        trainer_in(tmp_path / "file").validate(Untouched())


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_a_misspelt_checkpoint_is_told_before_a_process_is_started(stage: str, tmp_path: Path) -> None:
    quick = {"max_steps": 1, "limit_train_batches": 1, "limit_val_batches": 0}
    trainer = trainer_in(tmp_path, **quick)
    trainer.fit(BoringModel())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    before = dict(os.environ)
    launching = Trainer(accelerator="cpu", devices=2, strategy=MegatronStrategy(), logger=False)
    with pytest.raises(MissingCheckpointError) as caught:
        getattr(launching, stage)(Untouched(), ckpt_path=tmp_path / "lsat.ckpt")
    assert (
        str(caught.value)
        == f"loading {tmp_path}/lsat.ckpt: it does not exist (Checkpoint file not found); checkpoints there: last.ckpt"
    )
    assert dict(os.environ) == before, "no process was started"


def failing(folder: Path) -> tuple[str, str]:
    try:
        trainer_in(folder, devices=2, callbacks=[ModelCheckpoint(folder / "file")]).fit(Untouched())
    except ConfigError as error:
        return error.problems[0].argument, error.problems[0].reason
    return "", ""


def test_every_rank_tries_the_folder_of_checkpoints(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    fault = f"cannot be written there: Not a directory ({tmp_path / 'file'})"
    for argument, reason in ranks(2, failing, tmp_path):
        assert argument == "ModelCheckpoint.dirpath"
        assert reason.startswith(f"{fault} (rank 0 on ")
        assert ", rank 1 on " in reason
