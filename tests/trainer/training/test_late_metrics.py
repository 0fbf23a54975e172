"""Metrics of torchmetrics that a module makes in a hook: their sums are those of DDP, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from lightning_megatron import MegatronStrategy
from lightning_megatron.testing.trainer import kind_in_tests, quiet_trainer

Ranks = Callable[..., list[Any]]
Found = dict[str, dict[str, float]]
pytestmark = pytest.mark.skipif(kind_in_tests().type != "cpu", reason="stock's numbers are those of a CPU")
ROWS = torch.arange(8.0)


class Sums(LightningModule):
    """Sums its samples in metrics that a hook makes.

    Args:
        hook: the hook; ``"step"`` for the first step.
    """

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.net, self.found = nn.Linear(1, 1), dict[str, float]()
        setattr(self, hook, self.make)

    def make(self, *_: Any, **__: Any) -> None:
        if not hasattr(self, "sums"):
            self.sums = nn.ModuleDict({stage: SumMetric() for stage in ("learnt", "held_out")})

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.make()
        self.sums["learnt"].update(batch.sum())
        self.log("train_sum", self.sums["learnt"], on_step=False, on_epoch=True)
        loss: Tensor = self.net(batch[:, None]).mean()
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.sums["held_out"].update(batch.sum())

    def on_validation_epoch_end(self) -> None:
        self.found["val"] = float(self.sums["held_out"].compute())
        self.sums["held_out"].reset()

    def on_train_epoch_end(self) -> None:
        self.found["train"] = float(self.sums["learnt"].compute())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


HOOKS = ("setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "step")


def sums_of(strategy: Any, replicas: int) -> Found:
    found = {}
    for hook in HOOKS:
        module, mine = Sums(hook), ROWS[dist.get_rank() :: 2] if replicas == 2 else ROWS
        loader = DataLoader(mine, batch_size=2)  # type: ignore[arg-type]
        trainer = quiet_trainer(strategy(), max_epochs=1, use_distributed_sampler=False)
        trainer.fit(module, loader, loader)
        found[hook] = module.found | {"logged": float(trainer.callback_metrics["train_sum"])}
    return found


def of_ddp() -> Found:
    return sums_of(lambda: DDPStrategy(process_group_backend="gloo"), 2)


def of_ours(options: dict[str, int]) -> Found:
    return sums_of(lambda: MegatronStrategy(**options), 1 if options else 2)


@pytest.mark.parametrize("options", [{}, {"tp": 2}], ids=["dp", "tp"])
def test_a_metric_that_a_hook_makes_sums_the_samples_of_ddp(ranks: Ranks, options: dict[str, int]) -> None:
    total = float(ROWS.sum())
    expected = {hook: {"train": total, "val": total, "logged": total} for hook in HOOKS}
    assert ranks(2, of_ddp)[0] == expected
    for found in ranks(2, of_ours, options):
        assert found == expected
