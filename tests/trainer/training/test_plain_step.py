"""Python calls in a step of a plain module, on which most of its time goes: ours beside those of stock Lightning.

Calls and not seconds, as a count is the same on every machine. ``benchmarks/plain_step.py`` measures both.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import MegatronStrategy
from lightning_megatron.testing.trainer import quiet_trainer

FIRST, LAST = 8, 28
MORE = 335
"""Calls of a step on top of stock Lightning's: hooks of our callbacks, the record, buffers, and checks."""


class MLP(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Calls(Callback):
    """Counts the calls of Python from the end of one step to that of another."""

    def __init__(self) -> None:
        self.number = 0

    def _count(self, frame: FrameType, event: str, arg: Any) -> None:
        self.number += event == "call"

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == FIRST:
            self._before = sys.getprofile()
            sys.setprofile(self._count)
        elif trainer.global_step == LAST:
            sys.setprofile(self._before)


def calls_of_a_step(strategy: Any, precision: Any) -> float:
    torch.manual_seed(1)  # not the seed of Lightning, which processes that other tests start would inherit
    calls = Calls()
    data = TensorDataset(torch.randn(8 * 32, 32), torch.randint(10, (8 * 32,)))
    options: dict[str, Any] = {"accelerator": "cpu", "precision": precision, "callbacks": [calls]}
    trainer = quiet_trainer(strategy, max_steps=LAST + 1, **options)
    trainer.fit(MLP(), DataLoader(data, batch_size=8))
    return calls.number / (LAST - FIRST)


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_a_plain_module_pays_for_few_calls_more_than_under_stock_lightning(precision: str) -> None:
    stock, ours = calls_of_a_step("auto", precision), calls_of_a_step(MegatronStrategy(), precision)
    assert ours - stock <= MORE, (stock, ours)
