"""A run with plain DataLoaders that is resumed in mid-epoch reads what an uninterrupted run reads, each sample once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset, RandomSampler, WeightedRandomSampler

from lightning_megatron import MegatronStrategy
from lightning_megatron.testing.trainer import kind_in_tests, quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory", "ignore:The `srun`", "error:You're resuming")
EPOCHS = 3


class Rows(Dataset[torch.Tensor]):
    """Each row is its number; notes which were read in this process."""

    def __init__(self, count: int) -> None:
        self.count, self.read = count, list[int]()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> torch.Tensor:
        self.read.append(number)
        return torch.tensor([float(number)])


class Model(LightningModule):
    """Notes epoch, number and samples of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), list[tuple[int, int, Any]]()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows = list(batch.values()) if isinstance(batch, dict) else [batch]
        numbers = [row.flatten().int().tolist() for row in rows if row is not None]
        self.seen.append((self.current_epoch, batch_idx, numbers))
        return self.layer(rows[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def fit(
    folder: Path, data: Any, ckpt_path: Path | None = None, strategy: Any = None, one_file: bool = False, **options: Any
) -> Model:
    seed_everything(7, verbose=False)
    saver = ModelCheckpoint(folder, every_n_train_steps=1, filename="{step}", save_top_k=-1)
    settings: dict[str, Any] = {"max_epochs": EPOCHS, "callbacks": [saver], "enable_checkpointing": True} | options
    trainer: Trainer = quiet_trainer(strategy or MegatronStrategy(save_distributed_checkpoint=not one_file), **settings)
    trainer.fit(model := Model(), data, ckpt_path=ckpt_path)
    return model


LOADERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "in order": ({}, {}),
    "shuffled": ({"shuffle": True}, {}),
    "a short last batch": ({"shuffle": True, "batch_size": 5}, {}),
    "without the short one": ({"batch_size": 5, "drop_last": True}, {}),
    "an epoch that is cut off": ({"shuffle": True}, {"limit_train_batches": 3}),
    "accumulated": ({"shuffle": True}, {"accumulate_grad_batches": 2}),
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_resumed_run_reads_what_the_whole_run_reads(tmp_path: Path, name: str) -> None:
    given, options = LOADERS[name]

    def loader() -> DataLoader[Any]:
        return DataLoader(Rows(12), **{"batch_size": 3} | given)

    whole = fit(tmp_path, loader(), **options).seen
    for step in (1, 3, 4, 5):  # in mid-epoch, and at an epoch's end
        data = loader()
        rest = fit(tmp_path / "resumed", data, tmp_path / f"step={step}.ckpt", **options).seen
        assert rest == whole[-len(rest) :]
        assert data.dataset.read == [number for _, _, (numbers,) in rest for number in numbers]  # type: ignore[attr-defined]


def test_an_epoch_that_max_steps_cut_off_is_read_to_its_end(tmp_path: Path) -> None:
    """Lightning counts it as done: the rest has the next number, and the epochs behind it theirs plus one."""

    def loader() -> DataLoader[Any]:
        return DataLoader(Rows(12), 3, shuffle=True)

    def samples(seen: list[tuple[int, int, Any]]) -> list[Any]:
        return [numbers for _, _, numbers in seen]

    options: dict[str, Any] = {"max_epochs": -1, "enable_checkpointing": False, "callbacks": []}
    whole, path = fit(tmp_path, loader(), max_steps=14, **options).seen, None
    for begin, end in ((0, 6), (6, 9), (9, 14)):
        model = fit(tmp_path, loader(), path, max_steps=end, **options)
        assert samples(model.seen) == samples(whole[begin:end])
        model.trainer.save_checkpoint(path := tmp_path / f"{end}.ckpt")


def test_workers_begin_where_the_checkpoint_was_saved(tmp_path: Path) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(Rows(12), 3, shuffle=True, num_workers=1, persistent_workers=True)

    whole = fit(tmp_path, loader()).seen
    assert fit(tmp_path / "resumed", loader(), tmp_path / "step=5.ckpt").seen == whole[5:]


@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size", "max_size"])
def test_each_of_several_loaders_goes_on(tmp_path: Path, mode: str) -> None:
    from lightning.pytorch.utilities import CombinedLoader

    def loaders() -> Any:
        return CombinedLoader(
            {"a": DataLoader(Rows(12), 2, shuffle=True), "b": DataLoader(Rows(6), 2, shuffle=True)}, mode
        )

    whole = fit(tmp_path, loaders()).seen
    for step in (2, 4):
        assert fit(tmp_path / "resumed", loaders(), tmp_path / f"step={step}.ckpt").seen == whole[step:]


@pytest.mark.skipif(kind_in_tests().type != "cpu", reason="compares with Lightning's strategy for a CPU")
def test_a_run_of_stock_lightning_goes_on_as_there_and_it_goes_on_with_ours(tmp_path: Path) -> None:
    """Stock Lightning saves no position: its resumed run reads the epoch's first batches again, and warns."""

    def loader() -> DataLoader[Any]:
        return DataLoader(Rows(12), 3)

    fit(tmp_path / "stock", loader(), strategy="auto")
    for step in (2, 4):  # in mid-epoch, and at an epoch's end
        file = tmp_path / "stock" / f"step={step}.ckpt"
        with nullcontext() if step == 4 else pytest.warns(UserWarning, match="You're resuming"):
            there = fit(tmp_path / "there", loader(), file, strategy="auto").seen
        with nullcontext() if step == 4 else pytest.warns(UserWarning, match="after 2 of 4 batches of an epoch"):
            assert fit(tmp_path / "ours", loader(), file, one_file=True).seen == there
    with pytest.warns(UserWarning, match="You're resuming"):
        rest = fit(tmp_path / "again", loader(), tmp_path / "ours" / "step=6.ckpt", strategy="auto").seen
    assert [place[:2] for place in rest] == [place[:2] for place in there[2:]]


def test_a_loader_serves_two_fits(tmp_path: Path) -> None:
    data = DataLoader(Rows(12), 3, shuffle=True)
    whole = fit(tmp_path, data).seen
    assert fit(tmp_path / "resumed", data, tmp_path / "step=5.ckpt").seen == whole[5:]


def test_lightning_warns_of_an_order_that_follows_from_more_than_the_epoch(tmp_path: Path) -> None:
    def loader() -> DataLoader[Any]:
        rows = Rows(12)
        return DataLoader(rows, 3, sampler=RandomSampler(rows, replacement=True))

    fit(tmp_path, loader())
    with pytest.raises(UserWarning, match="You're resuming"):
        fit(tmp_path / "resumed", loader(), tmp_path / "step=5.ckpt")


# Replicas and batch size.
OTHERS = [((2, 3), (2, 3)), ((1, 3), (2, 3)), ((2, 3), (1, 3)), ((2, 3), (1, 2)), ((1, 2), (2, 6))]


def _weighted(folder: Path) -> bool:
    """True if Lightning warns in a resumed run whose samples are drawn by weights."""

    def loader() -> DataLoader[Any]:
        return DataLoader(Rows(24), 3, sampler=WeightedRandomSampler([1.0] * 24, 24))

    fit(folder, loader())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fit(folder / "resumed", loader(), folder / "step=2.ckpt")
    return any("You're resuming" in str(warning.message) for warning in found)


def test_lightning_warns_of_drawn_samples_on_two_replicas_too(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    """Its sampler for several ranks is a DistributedSampler around the user's."""
    assert ranks(2, _weighted, tmp_path)[0]


def _part(folder: Path, size: int, step: int | None) -> list[tuple[int, int, Any]]:
    path = None if step is None else folder / f"step={step}.ckpt"
    name = "first" if step is None else "second"
    return fit(folder if step is None else folder / name, DataLoader(Rows(24), size, shuffle=True), path).seen


def _samples(parts: list[list[tuple[int, int, Any]]], epoch: int, begin: int = 0, end: int | None = None) -> list[int]:
    each = [[numbers for at, _, (numbers,) in part if at == epoch][begin:end] for part in parts]
    return sorted(number for part in each for numbers in part for number in numbers)


@pytest.mark.parametrize(
    ("before", "after"), [((2, 3), (2, 3)), ((1, 3), (2, 3)), ((2, 3), (1, 3)), ((2, 3), (1, 2)), ((1, 2), (2, 6))]
)
def test_other_replicas_and_batches_read_the_rest_of_the_epoch(
    ranks: Callable[..., list[Any]], tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    def run(count: int, size: int, step: int | None) -> list[list[tuple[int, int, Any]]]:
        return [_part(tmp_path, size, step)] if count == 1 else ranks(count, _part, tmp_path, size, step)

    first = run(*before, None)
    second = run(*after, 2)
    everything = list(range(24))
    assert sorted(_samples(first, 0, end=2) + _samples(second, 0)) == everything
    assert _samples(second, 1) == _samples(second, 2) == everything
    if before == after:
        assert second == [part[2:] for part in first]
