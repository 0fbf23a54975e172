"""Lightning's search for a batch size finds what it finds in a stock run, and the run behind it has stock's numbers."""

from __future__ import annotations

from collections.abc import Callable
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

from lightning_megatron import (
    ConfigError,
    LlamaModule,
    MegatronBatchSizeFinder,
    MegatronDataModule,
    MegatronStrategy,
)
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.data import IndexedDatasetWriter
from lightning_megatron.lightning.validation.features import callback_problems
from lightning_megatron.testing.trainer import quiet_trainer
from tests.tiny import tiny_llama

Ranks = Callable[..., list[Any]]

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


@pytest.mark.parametrize("axis", ["tp", "cp", "pp", "ep"])
def test_refused_where_a_rank_holds_a_part_of_a_model(axis: str) -> None:
    layout = ParallelLayout(**{axis: 2}, dp=2)  # type: ignore[arg-type]
    for finder in (BatchSizeFinder(), MegatronBatchSizeFinder()):
        (problem,) = callback_problems([finder], layout, None, [])
        assert "with data parallelism alone (tp=pp=cp=ep=1)" in problem.reason


def test_lightnings_own_is_refused_on_several_replicas() -> None:
    replicas = ParallelLayout(dp=4)
    (problem,) = callback_problems([BatchSizeFinder()], replicas, None, [])
    assert problem.reason == "it takes one device: give MegatronBatchSizeFinder, with the same arguments, for several"
    assert callback_problems([MegatronBatchSizeFinder()], replicas, None, []) == []


class Poor(Stock):
    """A module that has too little memory for large batches on one rank alone, at one place of a step."""

    def __init__(self, place: str, rank: int, batch_size: int = 2) -> None:
        super().__init__(batch_size)
        self.place, self.rank, self.further = place, rank, nn.Linear(1, 3)

    def come(self, place: str, rows: int) -> None:
        if place == self.place and self.trainer.global_rank == self.rank:
            refuse(rows)

    def transfer_batch_to_device(self, batch: Tensor, device: torch.device, dataloader_idx: int) -> Tensor:
        self.come("copy", len(batch))
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.layer(batch)
        self.come("forward", len(batch))
        hidden.register_hook(lambda _: self.come("backward", len(batch)))
        loss = self.further(hidden).square().mean()
        self.log("loss", loss, sync_dist=True)  # a collective after the forward
        return loss


def search_and_train(place: str, rank: int, mode: str, size: int | None) -> Any:
    """Size and weights after a search and a fit, or after a fit with a given size."""
    torch.manual_seed(0)
    module = Poor(place, rank, size or 2)
    finder = [MegatronBatchSizeFinder(mode)] if size is None else []
    strategy = MegatronStrategy(bucket_size=4)
    trainer = quiet_trainer(strategy, callbacks=finder, max_steps=4)
    trainer.fit(module)
    return module.batch_size, weights(module)


@pytest.mark.parametrize(
    ("place", "rank", "mode"),
    [
        ("copy", 1, "power"),
        ("forward", 0, "power"),
        ("backward", 1, "binsearch"),
        ("forward", 1, "binsearch"),
        ("backward", 0, "power"),
    ],
)
def test_replicas_agree_on_the_size_that_fits_the_poorest(ranks: Ranks, place: str, rank: int, mode: str) -> None:
    expected = 8 if mode == "power" else 11
    found = ranks(2, search_and_train, place, rank, mode, None)
    given = ranks(2, search_and_train, "nowhere", rank, mode, expected)
    for (size, own), (_, wanted) in zip(found, given, strict=True):
        assert size == expected
        torch.testing.assert_close(own, wanted, rtol=0, atol=0)


class PoorModel(LlamaModule):
    """A model that fits with few rows alone on the second rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_rank == 1:
            refuse(len(batch["tokens"]))
        return super().training_step(batch, batch_idx)


def search_in_our_data(prefix: str, size: int | None) -> Any:
    data = MegatronDataModule(prefix, 8, size or 1, "1,0,0")
    torch.manual_seed(1)
    module = PoorModel(tiny_llama(), lr=0.01)
    finder = [MegatronBatchSizeFinder()] if size is None else []
    trainer = quiet_trainer(MegatronStrategy(), callbacks=finder, max_steps=2, limit_val_batches=0)
    trainer.fit(module, data)
    return data.batch_size, weights(module)


def test_replicas_agree_with_our_data_and_models(ranks: Ranks, tmp_path: Path) -> None:
    data_of(tmp_path)
    found, given = (ranks(2, search_in_our_data, str(tmp_path / "text"), size) for size in (None, 8))
    for (size, own), (_, wanted) in zip(found, given, strict=True):
        assert size == 8
        torch.testing.assert_close(own, wanted, rtol=0, atol=0)


class Breaks(torch.optim.SGD):
    """An optimizer whose state has no room."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")


class NoRoomForStates(Poor):
    """A module whose optimizer needs more memory than there is."""

    def configure_optimizers(self) -> Any:
        return Breaks(self.parameters(), lr=0.1)


def without_room(folder: str) -> str:
    finder, strategy = [MegatronBatchSizeFinder()], MegatronStrategy(distributed_optimizer=False)
    trainer = quiet_trainer(strategy, callbacks=finder, max_steps=4, default_root_dir=folder)
    with pytest.raises(RuntimeError) as raised:
        trainer.fit(NoRoomForStates("nowhere", 0))
    return str(raised.value)


def test_no_smaller_batch_is_tried_for_states_that_do_not_fit(ranks: Ranks, tmp_path: Path) -> None:
    expected = "the optimizer's step does not fit the device's memory, with any batch size"
    assert ranks(2, without_room, str(tmp_path)) == [expected] * 2
