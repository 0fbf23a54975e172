"""A stop writes the last checkpoint that ``ModelCheckpoint`` replaces from then on, under the name that stock keeps.

All are held against stock Lightning's run without a stop: the same names of last checkpoints, at the same steps.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_megatron import MegatronStrategy
from lightning_megatron.testing.trainer import quiet_trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:Checkpoint directory", "ignore:You're resuming", "ignore:The `srun`", "ignore:Be aware that"
)
Savers = Callable[[Path], list[ModelCheckpoint]]


class Kill(Callback):
    """Sends the last rank a signal, so that the run stops at a step."""

    def __init__(self, step: int) -> None:
        self.step = step - 2  # ranks agree while the next step is under way

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)


class Worse(BoringModel):
    """Logs a metric that gets worse in every step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("worse", float(self.global_step))
        return super().training_step(batch, batch_idx)


def run(strategy: Any, savers: list[ModelCheckpoint], stop: int | None = None, **options: Any) -> dict[str, int]:
    """Last checkpoints behind a run of eight steps, or one that is stopped, and their steps."""
    ckpt_path = options.pop("ckpt_path", None)
    callbacks = [*([] if stop is None else [Kill(stop)]), *savers]
    settings = {"max_steps": 8, "limit_val_batches": 0, "enable_checkpointing": True} | options
    trainer = quiet_trainer(strategy, callbacks=callbacks, **settings)
    with nullcontext() if stop is None else pytest.raises(SystemExit):
        trainer.fit(Worse(), ckpt_path=ckpt_path)
    assert trainer.global_step == (stop or 8)
    return lasts(Path(savers[0].dirpath or ""))


def lasts(folder: Path) -> dict[str, int]:
    found = {}
    for path in sorted(folder.glob("*last*.ckpt")):
        file = path / "meta.pt" if path.is_dir() else path
        found[path.name] = torch.load(file, weights_only=False)["global_step"]
    return found


def every_fourth(folder: Path, **options: Any) -> list[ModelCheckpoint]:
    chosen: dict[str, Any] = {"every_n_train_steps": 4, "filename": "{step}", "save_last": True}
    return [ModelCheckpoint(folder, **chosen | options)]


def linked(folder: Path) -> list[ModelCheckpoint]:
    return every_fourth(folder, save_last="link")


def several(folder: Path) -> list[ModelCheckpoint]:
    best = every_fourth(folder, save_last=None, monitor="worse", filename="best-{step}")
    return best + every_fourth(folder)


def renamed(folder: Path) -> list[ModelCheckpoint]:
    savers = every_fourth(folder)
    savers[0].CHECKPOINT_NAME_LAST = "{step}-last"
    return savers


@pytest.mark.parametrize("stop", [3, 4], ids=["before", "at"])
@pytest.mark.parametrize(("savers", "one_file"), [
    (every_fourth, False), (every_fourth, True), (linked, False), (linked, True), (several, False), (renamed, False),
], ids=["last", "last-one-file", "link", "link-one-file", "several", "renamed"])  # fmt: skip
def test_later_saves_replace_what_a_stop_has_saved(tmp_path: Path, savers: Savers, one_file: bool, stop: int) -> None:
    first, second = (MegatronStrategy(save_distributed_checkpoint=not one_file) for _ in range(2))
    folder = tmp_path / "ours"
    [(name, step)] = run(first, savers(folder), stop).items()
    assert step == stop
    ours = run(second, savers(folder), ckpt_path=str(folder / name))
    stock = run("auto", savers(tmp_path / "stock"))
    ours.pop(name if name not in stock else "", None)  # what a run was resumed from is kept, as in stock
    assert ours == stock
    assert set(stock.values()) == {8}


@pytest.mark.parametrize("savers", [every_fourth, linked])
def test_on_two_ranks(ranks: Any, tmp_path: Path, savers: Savers) -> None:
    assert ranks(2, stopped_twice, tmp_path, savers) == [{"last.ckpt": 8}] * 2


def stopped_twice(folder: Path, savers: Savers) -> dict[str, int]:
    for stop in (3, 6):
        path = str(folder / "last.ckpt") if stop > 3 else None
        assert run(MegatronStrategy(), savers(folder), stop, ckpt_path=path) == {"last.ckpt": stop}
    return run(MegatronStrategy(), savers(folder), ckpt_path=str(folder / "last.ckpt"))


def test_a_link_does_not_take_the_place_of_newer_steps(tmp_path: Path) -> None:
    # In its step the callback finds nothing better, and would lead its link to the best checkpoint, of step 2.
    [saver] = every_fourth(tmp_path, save_last="link", monitor="worse", every_n_train_steps=2)
    assert run(MegatronStrategy(), [saver], 4) == {"last.ckpt": 4}
    assert saver.save_last == "link"


def test_paths_that_are_spelled_in_other_ways_are_the_runs_own(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    options: dict[str, Any] = {"default_root_dir": "./run"}
    first = ModelCheckpoint(every_n_train_steps=4, save_last=True)
    assert run(MegatronStrategy(), [first], 3, **options) == {"last.ckpt": 3}
    # Another interval, so that the callback has no state in the checkpoint.
    for stop, step in ((6, 6), (None, 8)):
        savers = [ModelCheckpoint(every_n_train_steps=8, save_last=True)]
        found = run(MegatronStrategy(), savers, stop, ckpt_path="run/checkpoints/last.ckpt", **options)
        assert found == {"last.ckpt": step}
