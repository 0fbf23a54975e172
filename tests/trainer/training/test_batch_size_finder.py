"""Lightning's search for a batch size finds what it finds in a stock run, and the run behind it has stock's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import ConfigError, LlamaModule, MegatronDataModule, MegatronStrategy
from lightning_megatron.data import IndexedDatasetWriter
from lightning_megatron.testing.trainer import quiet_trainer
from tests.tiny import tiny_llama

FITS = 12
"""Rows that the pretended device has memory for."""


def refuse(rows: int) -> None:
    if rows > FITS:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Stock(LightningModule):
    """A module without anything of ours, with momentum to be put back after each trial."""

    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.batch_size = nn.Linear(4, 1), batch_size
        self.seen: list[int] = []

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.arange(256.0).view(64, 4) / 256, batch_size=self.batch_size)  # type: ignore[arg-type]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(len(batch))
        refuse(len(batch))
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Small(LlamaModule):
    """A model that fits with few rows alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        refuse(len(batch["tokens"]))
        return super().training_step(batch, batch_idx)


def weights(module: LightningModule) -> dict[str, Tensor]:
    return {name: value.detach().cpu() for name, value in module.state_dict().items()}


def tuned(trainer: Trainer, module: LightningModule, data: Any = None, **how: Any) -> int | None:
    found = Tuner(trainer).scale_batch_size(module, datamodule=data, init_val=2, **how)
    trainer.fit(module, datamodule=data)
    return found


@pytest.mark.parametrize(("mode", "expected"), [("power", 8), ("binsearch", 11)])
@pytest.mark.parametrize("through", ["callback", "tuner"])
def test_the_same_size_and_the_same_run_as_stock(tmp_path: Path, mode: str, expected: int, through: str) -> None:
    found = {}
    for name, strategy in (("stock", "auto"), ("ours", MegatronStrategy())):
        finder = [BatchSizeFinder(mode)] if through == "callback" else []
        module, folder = Stock(), tmp_path / name
        trainer = quiet_trainer(strategy, callbacks=finder, max_steps=4, default_root_dir=folder)
        size: Any = tuned(trainer, module, mode=mode) if not finder else None
        if finder:
            trainer.fit(module)
            size = finder[0].optimal_batch_size
        found[name] = size, module.batch_size, module.seen, trainer.global_step, weights(module)
        assert not list(folder.rglob(".scale_batch_size*"))
    *stock, expected_weights = found["stock"]
    *ours, own_weights = found["ours"]
    assert ours == stock
    assert ours[:2] == [expected, expected]
    torch.testing.assert_close(own_weights, expected_weights, rtol=1e-6, atol=0)


def data_of(folder: Path, batch_size: int = 1, **options: Any) -> MegatronDataModule:
    prefix = str(folder / "text")
    with IndexedDatasetWriter(prefix, np.dtype(np.uint16)) as writer:
        for tokens in np.random.RandomState(0).randint(0, 40, (4, 41)):
            writer.add_document(tokens, [len(tokens)])
    return MegatronDataModule(prefix, 8, batch_size, "1,0,0", **options)


def trained(data: MegatronDataModule, *, search: bool) -> tuple[int, dict[str, Tensor]]:
    torch.manual_seed(1)
    module = Small(tiny_llama(), lr=0.01)
    callbacks = [BatchSizeFinder()] if search else []
    trainer = quiet_trainer(MegatronStrategy(), callbacks=callbacks, max_steps=5, limit_val_batches=0)
    trainer.fit(module, data)
    assert trainer.global_step == 5
    return data.batch_size, weights(module)


def test_our_data_are_those_of_the_size_that_is_found(tmp_path: Path) -> None:
    """Forty samples for five steps, as if the size had been given, and not ten in four rounds."""
    size, found = trained(data_of(tmp_path), search=True)
    assert size == 8
    _, expected = trained(data_of(tmp_path, 8), search=False)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_size_set_by_hand_counts(tmp_path: Path) -> None:
    data = data_of(tmp_path)
    data.batch_size = 8
    torch.testing.assert_close(trained(data, search=False), trained(data_of(tmp_path, 8), search=False), rtol=0, atol=0)
    for wrong in (0, -1, 2.5, True):
        with pytest.raises(ConfigError, match=f"batch_size={wrong}: must be a whole number of at least 1"):
            data.batch_size = wrong  # type: ignore[assignment]
    assert data.batch_size == 8


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"global_batch_size": 4}, "global_batch_size=4: with batch_size=2"),
        ({"train_samples": 20}, "batch_size=2: the number of steps follows from it and train_samples"),
    ],
)
def test_a_size_that_follows_from_another_argument_is_not_searched(
    tmp_path: Path, options: dict[str, int], fault: str
) -> None:
    trainer = quiet_trainer(MegatronStrategy(), limit_val_batches=0, default_root_dir=tmp_path)
    with pytest.raises(ConfigError, match=fault):
        tuned(trainer, Small(tiny_llama(), lr=0.01), data_of(tmp_path, **options))


def test_refused_with_micro_batches(tmp_path: Path) -> None:
    trainer = quiet_trainer(MegatronStrategy(micro_batch_size=1), default_root_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"callbacks='BatchSizeFinder': .* without micro_batch_size"):
        tuned(trainer, Stock())
