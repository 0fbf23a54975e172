"""``ModelCheckpoint`` that waits for a metric: what is not saved is said, once, and only then."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_megatron import MegatronStrategy


class Module(BoringModel):
    """Logs a loss of its own in each loop."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        out = super().training_step(batch, batch_idx)
        self.log("train_loss", out["loss"])
        return out

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.log("val_loss", self.step(batch))


def said(folder: Path, trainer: dict[str, Any], **callback: Any) -> tuple[list[str], list[str]]:
    """Warnings of missed saves, and what was saved before the end of the first pass over the data."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        Trainer(
            accelerator="cpu",
            devices=1,
            strategy=MegatronStrategy(),
            max_steps=6,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[ModelCheckpoint(folder, **callback)],
            **trainer,
        ).fit(Module())
    texts = [str(warning.message) for warning in caught]
    return [text for text in texts if "has saved nothing yet" in text], sorted(path.name for path in folder.glob("*"))


def test_a_save_that_waits_for_validation_is_named_once(tmp_path: Path) -> None:
    warned, saved = said(tmp_path, {}, monitor="val_loss", every_n_train_steps=2)
    assert saved == []
    assert len(warned) == 1
    assert "ModelCheckpoint(monitor='val_loss', every_n_train_steps=2)" in warned[0]


@pytest.mark.parametrize(
    ("trainer", "callback"),
    [
        ({"val_check_interval": 2}, {"monitor": "val_loss", "every_n_train_steps": 2}),
        ({"val_check_interval": 2}, {"monitor": "val_loss"}),
        ({}, {"monitor": "train_loss", "every_n_train_steps": 2}),
        ({}, {"every_n_train_steps": 2}),
    ],
)
def test_nothing_is_said_where_all_is_saved(tmp_path: Path, trainer: dict[str, Any], callback: dict[str, Any]) -> None:
    warned, saved = said(tmp_path, trainer, **callback)
    assert warned == []
    assert saved
