"""What loaders of a resumed run draw is what they drew for the first run, and training goes on as if in one run.

Splits are held against those of stock Lightning's first run; draws of the steps against a run without an interruption.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset, random_split

from lightning_megatron import MegatronStrategy
from lightning_megatron.testing.trainer import quiet_trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:Checkpoint directory", "ignore:The `srun`", "ignore:Be aware that",
    "ignore:`isinstance",
)  # fmt: skip
ROWS, BATCH = 24, 3


class Rows(Dataset[torch.Tensor]):
    """Each row is its number, with noise that the process draws which reads it."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.tensor([float(number), float(torch.rand(())), random.random(), float(np.random.rand())])


class Data(LightningDataModule):
    """Draws its split in a hook, or in the first one that needs it."""

    def __init__(self, hook: str, workers: int = 0) -> None:
        super().__init__()
        self.hook, self.workers = hook, workers
        self.splits: list[list[int]] = []

    def _split(self, hook: str) -> None:
        if hook == self.hook or (self.hook == "first" and not self.splits):
            self.part, self.held_out = random_split(Rows(), [12, 12])
            order = torch.randperm(12).tolist()
            random.shuffle(order)
            self.splits.append([self.part.indices[place] for place in np.random.permutation(order)])

    def train_dataloader(self) -> DataLoader[Any]:
        self._split("train_dataloader")
        return DataLoader(self.part, batch_size=BATCH, shuffle=not self.workers, num_workers=self.workers)

    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        self._split("val_dataloader")
        return DataLoader(self.held_out, batch_size=BATCH) if self.hook == "first" else []


class Model(LightningModule):
    """Draws in every step, as dropout does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = torch.nn.Linear(3, 1), torch.nn.Dropout(0.5)
        self.seen: list[list[float]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.dropout(self.layer(batch[:, 1:])).square().mean()
        self.seen.append([*batch.flatten().tolist(), random.random(), float(np.random.rand()), loss.item()])
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.layer(batch[:, 1:])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def fit(folder: Path, strategy: Any, data: Data, ckpt_path: Path | None = None, **options: Any) -> tuple[Data, Model]:
    seed_everything(7, verbose=False, workers=True)
    saver = ModelCheckpoint(folder, every_n_train_steps=1, filename="{step}", save_top_k=-1)
    settings: dict[str, Any] = {"max_epochs": 3, "callbacks": [saver], "enable_checkpointing": True} | options
    trainer: Trainer = quiet_trainer(strategy, **settings)
    trainer.fit(model := Model(), data, ckpt_path=ckpt_path)
    return data, model


def resumed(folder: Path, step: int, *data: Any, **options: Any) -> list[list[int]]:
    """A run that is resumed behind a step has the first run's split, and does and draws what the whole run does."""
    first, whole = fit(folder, MegatronStrategy(), Data(*data), **options)
    again, rest = fit(folder, MegatronStrategy(), Data(*data), folder / f"step={step}.ckpt", **options)
    assert again.splits == first.splits
    assert rest.seen == whole.seen[step:]
    return again.splits


@pytest.mark.parametrize("hook", ["train_dataloader", "first"])
@pytest.mark.parametrize("step", [2, 4], ids=["mid-epoch", "epoch's end"])
def test_a_split_is_that_of_the_first_run_as_in_stock(tmp_path: Path, hook: str, step: int) -> None:
    options: dict[str, Any] = {"num_sanity_val_steps": 2, "check_val_every_n_epoch": 3}
    ours = resumed(tmp_path, step, hook, **options)
    stock, _ = fit(tmp_path / "stock", "auto", Data(hook), **options)
    assert ours == stock.splits


def test_workers_draw_what_they_draw_in_one_run(tmp_path: Path) -> None:
    resumed(tmp_path, 4, "train_dataloader", 1)


def test_replicas_have_the_first_runs_split(ranks: Any, tmp_path: Path) -> None:
    ranks(2, resumed, tmp_path, 2, "train_dataloader")
