"""The loss in the progress bar, which is read a step later on a device, beside what loggers and callbacks get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_megatron import LlamaModule, MegatronStrategy
from lightning_megatron.device import CPU
from lightning_megatron.testing.trainer import kind_in_tests, quiet_trainer
from tests.tiny import tiny_llama

STEPS = 4


class Losses(Callback):
    """What a step returns, what callbacks can read at its end, and what the bar shows."""

    def __init__(self) -> None:
        self.returned: list[float] = []
        self.read: list[float] = []
        self.shown: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.returned.append(float(outputs["loss"]))
        self.read.append(float(trainer.callback_metrics["train_loss"]))
        self.shown.append(trainer.progress_bar_metrics["train_loss"])


def fit(folder: Path, strategy: Any) -> tuple[Losses, Any]:
    seed_everything(3, verbose=False)
    tokens = torch.randint(40, (2 * STEPS, 9), generator=torch.Generator().manual_seed(3))
    losses = Losses()
    options: dict[str, Any] = {"max_epochs": 1, "log_every_n_steps": 1, "enable_progress_bar": True}
    trainer = quiet_trainer(strategy, callbacks=[losses], logger=CSVLogger(folder), **options)
    rows: Any = [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]
    trainer.fit(LlamaModule(tiny_llama(), lr=1e-2), DataLoader(rows, batch_size=2))
    return losses, trainer


def test_loggers_and_callbacks_get_the_loss_of_the_step_and_the_bar_a_number_that_is_known(tmp_path: Path) -> None:
    losses, trainer = fit(tmp_path, MegatronStrategy())
    assert len(losses.returned) == STEPS
    assert losses.read == losses.returned
    header, *lines = (Path(trainer.logger.log_dir) / "metrics.csv").read_text().split()
    column = header.split(",").index("train_loss")
    assert [float(line.split(",")[column]) for line in lines] == pytest.approx(losses.read)
    late = [losses.read[0], *losses.read[:-1]]
    assert losses.shown == (losses.read if kind_in_tests() is CPU else late)
    assert trainer.progress_bar_metrics["train_loss"] == losses.read[-1]


@pytest.mark.skipif(kind_in_tests() is not CPU, reason="stock Lightning has no Gaudi")
def test_another_strategy_shows_it_as_lightning_does(tmp_path: Path) -> None:
    losses, _ = fit(tmp_path, "auto")
    assert losses.shown == losses.read
