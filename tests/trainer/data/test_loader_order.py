"""In which order samples come, against Lightning on one device; and loaders that do not know their length."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import LlamaModule, MegatronDataModule, MegatronStrategy
from lightning_megatron.data import IndexedDatasetWriter
from lightning_megatron.testing.trainer import quiet_trainer

Ranks = Callable[..., list[Any]]


class Seen(LightningModule):
    """Notes the first number of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.order: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.order.append(float(batch.flatten()[0]))
        return self.weight * batch.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def order(strategy: Any, shuffle: bool, **options: Any) -> list[float]:
    seed_everything(3, verbose=False)
    module = Seen()
    trainer = quiet_trainer(strategy, **{"max_epochs": 2} | options)
    trainer.fit(module, DataLoader(torch.arange(6.0), batch_size=2, shuffle=shuffle))  # type: ignore[arg-type]
    return module.order


IN_ORDER = [0.0, 2.0, 4.0] * 2


def test_one_rank_reads_what_stock_reads() -> None:
    assert order(MegatronStrategy(), shuffle=False) == order("auto", shuffle=False) == IN_ORDER
    own = {"use_distributed_sampler": False}
    assert order(MegatronStrategy(), shuffle=True, **own) == order("auto", shuffle=True, **own) != IN_ORDER
    overfit = {"overfit_batches": 2}
    assert order(MegatronStrategy(), shuffle=True, **overfit) == order("auto", shuffle=True, **overfit)


def orders(shuffle: bool) -> list[float]:
    return order(MegatronStrategy(tp=2), shuffle)


def test_ranks_of_one_replica_read_in_order_or_in_one_order_of_each_epoch(ranks: Ranks) -> None:
    assert ranks(2, orders, False) == [IN_ORDER] * 2
    one, other = ranks(2, orders, True)
    assert one == other == order(MegatronStrategy(), shuffle=True)  # and in all layouts the same one
    assert one[:3] != one[3:]


class Stream(DataLoader[Any]):
    def __len__(self) -> int:
        raise NotImplementedError("nobody knows")


def test_a_loader_that_does_not_know_its_length() -> None:
    module = Seen()
    trainer = quiet_trainer(MegatronStrategy(), max_epochs=1, limit_train_batches=2)
    trainer.fit(module, Stream(torch.arange(6.0), batch_size=2))  # type: ignore[arg-type]
    assert module.order == [0.0, 2.0]


class Tokens(LlamaModule):
    def on_train_start(self) -> None:
        self.seen: list[bytes] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(batch["tokens"].cpu().numpy().tobytes())
        return super().training_step(batch, batch_idx)


def test_overfit_batches_with_megatrons_data(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "corpus", np.uint16) as writer:
        for _ in range(20):
            writer.add_document(np.random.default_rng(1).integers(0, 40, 30), [30])
    module = Tokens("llama-tiny", num_layers=1, hidden_size=16, vocab_size=40)
    data = MegatronDataModule(str(tmp_path / "corpus"), seq_length=8, batch_size=2, split="90,10,0")
    quiet_trainer(MegatronStrategy(), overfit_batches=2, max_epochs=3).fit(module, datamodule=data)
    assert len(module.seen) == 6
    assert module.seen[:2] == module.seen[2:4] == module.seen[4:]
