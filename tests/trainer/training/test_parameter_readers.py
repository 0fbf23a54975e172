"""A callback that reads parameters between steps reads those of the last step, wherever its class comes from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, LearningRateMonitor
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import KillSwitch, MegatronStrategy, Throughput
from lightning_megatron.lightning.step.watchers import watches_parameters
from lightning_megatron.testing.trainer import quiet_trainer
from tests.late import late_gathers

Ranks = Callable[..., list[Any]]


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Hooked(Callback):
    def on_train_batch_end(self, *_: Any) -> None: ...


class SaysNo(Hooked):
    reads_parameters = False


class OverridesOne(Throughput):
    def on_train_batch_start(self, *_: Any) -> None: ...


class OverridesNone(LearningRateMonitor): ...


class ReadsElsewhere(Throughput):
    reads_parameters = True


class InOurPackage(Hooked):
    """A callback of this package that does not say that it leaves parameters alone."""


InOurPackage.__module__ = "lightning_megatron.lightning.callbacks.new"


@pytest.mark.parametrize(
    ("callback", "reads"),
    [
        (Hooked(), True),
        (SaysNo(), False),
        (OverridesOne(), True),
        (OverridesNone(), False),
        (ReadsElsewhere(), True),
        (InOurPackage(), True),
        (LambdaCallback(on_train_batch_end=lambda *_: None), True),
        (LambdaCallback(on_fit_end=lambda *_: None), False),
        (EarlyStopping("loss"), False),
        (KillSwitch(), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Callback) else None,
)
def test_a_class_says_whether_its_hooks_read_parameters(callback: Callback, reads: bool) -> None:
    trainer = quiet_trainer(MegatronStrategy(), callbacks=[callback], max_steps=1)
    trainer.strategy.connect(Net())
    assert watches_parameters(trainer) is reads


def seen(overlap: bool) -> list[Tensor]:
    found: list[Tensor] = []

    def note(trainer: Trainer, module: LightningModule, *_: Any) -> None:
        found.append(torch.cat([p.detach().flatten().clone() for p in module.parameters()]))

    seed_everything(1, verbose=False)
    strategy = MegatronStrategy(bucket_size=8, overlap_param_gather=overlap)
    trainer = quiet_trainer(strategy, max_steps=3, callbacks=[LambdaCallback(on_train_batch_end=note)])
    samples: Any = torch.ones(12, 4)
    with late_gathers():
        trainer.fit(Net(), DataLoader(samples, batch_size=2))
    return found


def both() -> tuple[list[Tensor], list[Tensor]]:
    return seen(False), seen(True)


def test_a_function_between_steps_sees_the_values_of_the_last_step(ranks: Ranks) -> None:
    for waited, overlapped in ranks(2, both):
        assert len(waited) == 3
        for one, other in zip(waited, overlapped, strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=0)
