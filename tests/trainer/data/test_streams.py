"""Data that end early on one rank, or give nothing: an error on all ranks, at once, with ranks and counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_megatron import GPTModule, MegatronStrategy
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.lightning.streams.evaluation import coupled_ranks, may_stay_away
from lightning_megatron.testing.trainer import quiet_trainer

Ranks = Callable[..., list[Any]]
SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 32}
LAYOUTS: dict[str, dict[str, Any]] = {"dp2": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}}


class Stream(IterableDataset[Any]):
    """So many samples, each time anew, or once; with a length, if it is to claim one."""

    def __init__(self, count: int, once: bool = False) -> None:
        self.count, self.once, self.spent = count, once, False

    def __iter__(self) -> Iterator[Any]:
        if not (self.once and self.spent):
            self.spent = True
            tokens = torch.arange(9) % 32
            yield from ({"tokens": tokens[:-1] + 0 * n, "labels": tokens[1:]} for n in range(self.count))


class Claimed(Stream):
    claimed = 10

    def __len__(self) -> int:
        return self.claimed


class Rows(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.rows = list(Stream(count))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def loader(data: Any, batch_size: int = 2) -> DataLoader[Any]:
    return DataLoader(data, batch_size=batch_size)


def ending(run: Callable[[], object]) -> tuple[str, str]:
    """The error, and its class."""
    try:
        run()
    except BaseException as error:
        return type(error).__name__, str(error)
    return "", "no error"


def fit(layout: dict[str, Any], train: Any, val: Any = None, **options: Any) -> tuple[str, str, int]:
    steps: list[int] = []

    class Module(GPTModule):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            steps.append(batch_idx)
            return super().training_step(batch, batch_idx)

    options = {"max_epochs": 2, "use_distributed_sampler": False, **options}
    trainer = quiet_trainer(MegatronStrategy(**layout), **options)
    kind, text = ending(lambda: trainer.fit(Module("gpt-tiny", **SIZES), train, val))
    assert not any("Watch" in type(callback).__name__ for callback in trainer.callbacks)
    return kind, text, len(steps)


def uneven_runs(cases: list[str]) -> dict[str, tuple[str, str, int]]:
    rank = dist.get_rank()
    found = {}
    for name in cases:
        layout = LAYOUTS[name.split()[0]]
        if "stream" in name:
            found[name] = fit(layout, loader(Stream((12, 6)[rank])))
        elif "empty" in name:
            found[name] = fit(layout, loader(Stream((0, 6)[rank])), max_steps=4, max_epochs=-1)
        elif "limit" in name:
            found[name] = fit(layout, loader(Stream((12, 6)[rank])), limit_train_batches=5)
        elif "claim" in name:
            found[name] = fit(layout, loader(Claimed((12, 6)[rank])))
        elif "later" in name:
            found[name] = fit(layout, loader(Stream(4, once=rank == 1)))
        elif "sized" in name:
            found[name] = fit(layout, loader(Rows((12, 6)[rank])))
        elif "steps" in name:
            found[name] = fit(layout, loader(Rows((12, 6)[rank])), max_steps=3, max_epochs=-1)
        elif "timed" in name:
            found[name] = fit(layout, loader(Rows((12, 6)[rank])), max_time={"hours": 1}, max_epochs=-1)
        elif "validation" in name:
            found[name] = fit(layout, loader(Rows(4)), loader(Stream((12, 6)[rank])))
        elif "held out" in name:
            found[name] = fit(layout, loader(Rows(4)), loader(Rows(8), (2, 4)[rank]))
        elif "nothing" in name:
            found[name] = fit(layout, loader(Stream(0)), max_steps=4, max_epochs=-1)
    return found


TEXTS = {
    "stream": "the training data end after 3 batches on rank 1 and later on rank 0.",
    "empty": "the training data end after 0 batches on rank 0 and later on rank 1.",
    "limit": "the training data end after 3 batches on rank 1 and later on rank 0.",
    "claim": "the training data end after 3 batches on rank 1 and later on rank 0.",
    "later": "the training data end after 0 batches on rank 1 and later on rank 0.",
    "validation": "the val data end after 3 batches on rank 1 and later on rank 0.",
    "nothing": "the training data gave no batch in epoch 0.",
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_data_that_end_early_on_one_rank_are_an_error_on_both(ranks: Ranks, layout: str) -> None:
    names = [name for name in TEXTS if layout != "dp2" or name != "validation"]
    both = ranks(2, uneven_runs, [f"{layout} {name}" for name in names])
    for name in names:
        for kind, text, steps in (found[f"{layout} {name}"] for found in both):
            assert kind == "DataError", (name, text)
            assert text.startswith(TEXTS[name]), (name, text)
            assert steps <= 4
    assert [found[f"{layout} stream"][2] for found in both] == [3, 3]


def test_lengths_that_differ_are_named_before_the_first_step(ranks: Ranks) -> None:
    cases = ["dp2 sized", "tp2 sized", "tp2 held out", "dp2 steps", "dp2 timed"]
    for found in ranks(2, uneven_runs, cases):
        kind, text, steps = found["dp2 sized"]
        assert (kind, steps) == ("DataError", 0)
        assert text.startswith("the training data end after 3 batches on rank 1 and after 6 batches on rank 0.")
        kind, text, steps = found["tp2 sized"]
        assert (kind, steps) == ("ConfigError", 0)
        assert "train_dataloader.samples=12: on rank 0, but 6 on rank 1" in text
        kind, text, steps = found["tp2 held out"]
        assert kind == "ConfigError"
        assert "val_dataloader.batch_size=2: on rank 0, but 4 on rank 1" in text
        assert found["dp2 steps"] == ("", "no error", 3)  # who stops before the end may have shares of any size
        kind, text, steps = found["dp2 timed"]
        assert (kind, steps) == ("DataError", 3)
        assert text.startswith("the training data end after 3 batches on rank 1 and later on rank 0.")


def test_an_empty_stream_ends_after_its_first_epoch_on_one_rank_too() -> None:
    kind, text, steps = fit({}, loader(Stream(0)), max_steps=6, max_epochs=-1)
    assert (kind, steps) == ("DataError", 0)
    assert text.startswith("the training data gave no batch in epoch 0.")
    kind, text, steps = fit({}, loader(Stream(4, once=True)), max_steps=6, max_epochs=-1)
    assert (kind, steps) == ("DataError", 2)
    assert text.startswith("the training data gave no batch in epoch 1.")


class Counted(BoringModel):
    """Counts batches; knows nothing of their content."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(("train", batch_idx))
        return self.layer(torch.ones(2, 32, device=self.device)).sum()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append(("val", batch_idx))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None


def sound_runs(strategy: str) -> dict[str, Any]:
    """Batches that stock Lightning and ours see of valid data of any kind."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    val = [Stream(6), Stream(0), Rows(4)]
    cases: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "stream": (loader(Stream(6)), loader(Stream(6)), {}),
        "limit": (loader(Stream(12)), loader(Stream(6)), {"limit_train_batches": 2, "limit_val_batches": 1}),
        "shorter than its limit": (loader(Stream(4)), None, {"limit_train_batches": 20}),
        "claims more": (loader(Claimed(4)), None, {}),
        "leaves the epoch": (loader(Rows(20)), None, {}),
        "uneven, but limited": (loader(Rows((12, 6)[rank])), None, {"limit_train_batches": 2}),
        "several": (loader(Rows(4)), [loader(data) for data in val], {}),
        "steps": (loader(Stream(6)), None, {"max_steps": 4, "max_epochs": -1}),
        "reloads": (loader(Stream(4)), None, {"reload_dataloaders_every_n_epochs": 1}),
        "sanity": (loader(Stream(4)), loader(Stream(6)), {"num_sanity_val_steps": 2}),
        "no batches": ([], None, {}),
    }
    for mode in ("min_size", "max_size_cycle", "max_size"):
        cases[mode] = CombinedLoader([loader(Rows(4)), loader(Stream(8))], mode), None, {}  # type: ignore[arg-type]
    found = {}
    for name, (train, held_out, options) in cases.items():
        module = Counted()
        chosen = "ddp" if strategy == "ddp" else "auto" if strategy == "auto" else MegatronStrategy()
        trainer = quiet_trainer(chosen, **{"max_epochs": 2, "use_distributed_sampler": False, **options})
        text = ending(lambda trainer=trainer, module=module, t=train, v=held_out: trainer.fit(module, t, v))
        found[name] = module.seen, text, trainer.current_epoch, trainer.global_step
    return found


@pytest.mark.slow
def test_data_that_are_as_they_should_be_are_read_as_in_stock_lightning(ranks: Ranks) -> None:
    expected = ranks(2, sound_runs, "ddp")
    ours = ranks(2, sound_runs, "megatron")
    for name in expected[0]:
        assert ours[0][name] == expected[0][name], name
        assert ours[1][name] == expected[1][name], name
    alone = sound_runs("auto")
    assert sound_runs("megatron") == alone


def evaluates_apart() -> list[Any]:
    """Replicas that share nothing may have different numbers of batches."""
    rank = dist.get_rank()
    seen = []
    for data in (Stream((12, 6)[rank]), Rows((12, 6)[rank])):
        module = Counted()
        trainer = quiet_trainer(MegatronStrategy(), use_distributed_sampler=False)
        trainer.validate(module, loader(data), verbose=False)
        seen.append(len(module.seen))
    return seen


def test_replicas_may_be_evaluated_on_different_numbers_of_batches(ranks: Ranks) -> None:
    assert ranks(2, evaluates_apart) == [[6, 6], [3, 3]]


def test_who_waits_for_whom() -> None:
    assert coupled_ranks(ParallelLayout(tp=2).resolve(4)) == [(0, 1), (2, 3)]
    assert coupled_ranks(ParallelLayout(pp=2).resolve(4)) == [(0, 2), (1, 3)]
    assert coupled_ranks(ParallelLayout(ep=2).resolve(4)) == [(0, 1), (2, 3)]
    assert coupled_ranks(ParallelLayout().resolve(2)) == [(0,), (1,)]


def test_a_rank_without_batches_may_not_stay_away_where_replicas_share_experts() -> None:
    trainer: Any = SimpleNamespace(
        lightning_module=SimpleNamespace(allow_zero_length_dataloader_with_multiple_devices=True)
    )
    assert may_stay_away(trainer, ParallelLayout(tp=2).resolve(4))
    assert not may_stay_away(trainer, ParallelLayout(ep=2).resolve(4))
