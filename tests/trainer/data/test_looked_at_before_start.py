"""Loaders that a script looks at before a run: shares of data are known from the arguments, without processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, DistributedSampler

from lightning_megatron import MegatronStrategy
from lightning_megatron.testing.trainer import quiet_trainer

BATCHES = 24


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(list(torch.randn(BATCHES, 2)), shuffle=True)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def looked_at(strategy: Any, devices: int) -> Trainer:
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=3, logger=False, enable_checkpointing=False
    )
    trainer._data_connector.attach_data(module := Module())
    trainer.strategy.connect(module)
    trainer.fit_loop.setup_data()
    return trainer


@pytest.mark.parametrize(
    ("devices", "layout", "replicas"),
    [(1, {}, 1), (4, {}, 4), (4, {"tp": 2}, 2), (4, {"pp": 2, "tp": 2}, 1), (2, {"cp": 2}, 1)],
)
def test_replicas_and_steps_are_those_of_ddp_with_as_many_replicas(
    devices: int, layout: dict[str, int], replicas: int
) -> None:
    ours = looked_at(MegatronStrategy(**layout, micro_batch_size=1), devices)
    assert ours.strategy.distributed_sampler_kwargs == {"num_replicas": replicas, "rank": 0}
    sampler = ours.train_dataloader.batch_sampler.sampler
    assert isinstance(sampler, DistributedSampler)
    assert sampler.num_replicas == replicas
    stock = looked_at("ddp", replicas)
    assert ours.num_training_batches == stock.num_training_batches == BATCHES // replicas
    assert ours.estimated_stepping_batches == stock.estimated_stepping_batches


def test_the_rank_is_this_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "LOCAL_RANK": "6",
        "RANK": "6",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "8",
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    strategy = looked_at(MegatronStrategy(tp=2), 8).strategy
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 4, "rank": 3}  # ranks 6 and 7


def test_a_run_makes_its_loaders_anew() -> None:
    trainer = quiet_trainer(MegatronStrategy(), max_epochs=1)
    module = Module()
    trainer._data_connector.attach_data(module)
    trainer.strategy.connect(module)
    before = trainer.train_dataloader
    assert trainer.estimated_stepping_batches == BATCHES
    trainer.fit(module)
    assert trainer.train_dataloader is not before
    assert trainer.global_step == BATCHES
