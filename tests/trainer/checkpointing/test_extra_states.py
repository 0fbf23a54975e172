"""State that parts of a module give by ``get_extra_state``: each has its own, also where two are equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from lightning_megatron.testing.trainer import quiet_trainer


class Counter(nn.Module):
    """Counts calls; small numbers that are equal are one object in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state


class Counting(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.first, self.second = nn.Linear(4, 1), Counter(), Counter()
        self.begun: list[int] = []

    def on_train_start(self) -> None:
        self.begun = [self.first.count, self.second.count]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.first.count += 1
        self.second.count += 1
        return F.mse_loss(self.layer(batch), batch.sum(-1, keepdim=True))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Averages(Callback):
    """Keeps a version of the model under a key of its own, as weight averaging does."""

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["averages"] = dict(checkpoint["state_dict"])

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.names = set(checkpoint["averages"])


@pytest.mark.parametrize("how", [{}, {"save_distributed_checkpoint": False}, {"async_save": True}], ids=str)
def test_equal_numbers_are_restored_each(tmp_path: Path, how: dict[str, Any]) -> None:
    """Against the counts of the run that saved them."""
    for path in (None, tmp_path / "a.ckpt"):
        module, averages = Counting(), Averages()
        trainer = quiet_trainer(MegatronStrategy(**how), max_epochs=1 if path is None else 2, callbacks=[averages])
        trainer.fit(module, DataLoader(torch.randn(6, 4), batch_size=2), ckpt_path=path)  # type: ignore[arg-type]
        if path is None:
            trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert module.begun == [3, 3]
    assert averages.names == set(module.state_dict())
