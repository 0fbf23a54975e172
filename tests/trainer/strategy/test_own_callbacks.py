"""The strategy's own callbacks: their order among the user's, and that none stays behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_megatron import KillSwitch, MegatronStrategy
from lightning_megatron.lightning.strategy.start import ORDER
from lightning_megatron.testing.trainer import quiet_trainer


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Look(Callback):
    def __init__(self) -> None:
        self.seen: list[Callback] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen = list(trainer.callbacks)  # type: ignore[attr-defined]


def fit(tmp_path: Path, *callbacks: Callback) -> tuple[list[Callback], list[Callback], Trainer]:
    look, strategy = Look(), MegatronStrategy()
    savers = [ModelCheckpoint(tmp_path, save_last=True), ModelCheckpoint(tmp_path / "other", monitor="loss")]
    trainer = quiet_trainer(
        strategy,
        max_steps=2,
        default_root_dir=tmp_path,
        enable_checkpointing=True,
        callbacks=[*savers, look, EarlyStopping("loss", check_on_train_epoch_end=True), *callbacks],
    )
    before = list(trainer.callbacks)  # type: ignore[attr-defined]
    samples: Any = torch.ones(4, 4)
    trainer.fit(Net(), DataLoader(samples, batch_size=2))
    return before, look.seen, trainer


def kind(callback: Callback) -> type[Callback]:
    """The class in the order that a callback goes by."""
    return next(each for each in (*(k for k in ORDER if k is not Callback), Callback) if isinstance(callback, each))


def test_own_callbacks_come_in_the_order_of_the_list_and_leave(tmp_path: Path) -> None:
    before, during, trainer = fit(tmp_path)
    assert sorted(map(kind, during), key=ORDER.index) == list(map(kind, during))
    assert set(map(kind, during)) == set(ORDER)
    assert [callback for callback in during if kind(callback) in (Callback, Checkpoint)] == before
    assert trainer.callbacks == before  # type: ignore[attr-defined]


def test_a_switch_of_the_user_stays_where_it_is_and_is_the_only_one(tmp_path: Path) -> None:
    mine = KillSwitch()
    before, during, trainer = fit(tmp_path, mine)
    assert [callback for callback in during if isinstance(callback, KillSwitch)] == [mine]
    assert [callback for callback in during if callback in before] == before
    assert trainer.callbacks == before  # type: ignore[attr-defined]


def test_a_run_that_an_error_ends_leaves_no_callback(tmp_path: Path) -> None:
    class Fails(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            raise RuntimeError("on purpose")

    trainers: list[Trainer] = []

    class Keep(Callback):
        def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
            trainers.append(trainer)

    fails, keep = Fails(), Keep()
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(tmp_path, fails, keep)
    present = trainers[0].callbacks  # type: ignore[attr-defined]
    assert {kind(callback) for callback in present} == {Callback, Checkpoint}
