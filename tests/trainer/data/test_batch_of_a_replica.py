"""Ranks of one replica that read different samples end with an error that names them; others train on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_megatron import LlamaModule, MegatronStrategy
from lightning_megatron.errors import DataError
from lightning_megatron.testing.trainer import quiet_trainer

SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 32, "vocab_size": 64}
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "tp": (2, {"tp": 2}),
    "pp": (2, {"pp": 2}),
    "cp": (2, {"cp": 2}),
    "tp and dp": (4, {"tp": 2}),
}


def row(number: int, length: int = 17) -> dict[str, torch.Tensor]:
    tokens = (torch.arange(length) * (number % 7 + 1) + number) % 64
    return {"tokens": tokens[:-1], "labels": tokens[1:]}


class Rows(Dataset[Any]):
    """Rows of which some differ: each rank reads its own from a row on."""

    def __init__(self, own: int, first: int = 0, longer: bool = False) -> None:
        self._own, self._first, self._longer = own, first, longer

    def __len__(self) -> int:
        return 16

    def __getitem__(self, number: int) -> Any:
        own = self._own if number >= self._first else 0
        return row(number + own, 17 + 4 * own * self._longer)


class Stream(IterableDataset[Any]):
    def __init__(self, own: int, count: int) -> None:
        self._own, self._count = own, count

    def __iter__(self) -> Iterator[Any]:
        yield from (row(number) for number in range(self._own, 16 * self._count, self._count))


def train(layout: str, kind: str) -> str:
    """Text of the error of a run on data of a kind."""
    size, axes = LAYOUTS[layout]
    rank = torch.distributed.get_rank()
    same = Rows(0)
    replica = rank // 2 if layout == "tp and dp" else 0
    data: dict[str, Any] = {
        "same": same,
        "of the replica": Rows(replica),
        "own": Rows(rank),
        "own in the second epoch": same,
        "longer": Rows(rank, longer=True),
        "stream": Stream(rank, size),
        "own in the second validation": same,
        "own in the second loader of a validation": same,
    }
    trainer = quiet_trainer(MegatronStrategy(**axes), max_epochs=2, use_distributed_sampler=False)
    module = LlamaModule("llama-tiny", **SIZES, num_query_groups=2)
    held_out = Rows(0)
    validations = [held_out, Rows(rank)] if "second loader" in kind else [held_out]
    if kind == "own in the second validation":
        module.on_validation_end = lambda: vars(held_out).update(_own=rank)  # type: ignore[method-assign]
    if kind == "own in the second epoch":
        module.on_train_epoch_end = lambda: vars(same).update(_own=rank)  # type: ignore[method-assign]
    try:
        trainer.fit(module, DataLoader(data[kind], 2), [DataLoader(rows, 2) for rows in validations])
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("tp", "own"),
        ("tp", "longer"),
        ("pp", "stream"),
        ("cp", "own"),
        ("tp", "own in the second epoch"),
        ("pp", "own in the second validation"),
        ("tp", "own in the second loader of a validation"),
        pytest.param("tp and dp", "own", marks=pytest.mark.slow),
    ],
)
def test_different_samples_of_one_replica_end_the_run(ranks: Any, layout: str, kind: str) -> None:
    for text in ranks(LAYOUTS[layout][0], train, layout, kind):
        assert "ranks [0, 1] are one replica" in text
        assert "['tokens']" in text
        assert "strategy.data_parallel_rank" in text


@pytest.mark.parametrize(
    ("layout", "kind"),
    [("tp", "same"), ("pp", "same"), pytest.param("tp and dp", "of the replica", marks=pytest.mark.slow)],
)
def test_equal_samples_are_no_fault(ranks: Any, layout: str, kind: str) -> None:
    assert set(ranks(LAYOUTS[layout][0], train, layout, kind)) == {""}


@dataclass
class Fields:
    x: Tensor


class Movable:
    """A batch that Lightning moves by its own ``to``."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, *_: Any, **__: Any) -> Movable:
        return self


class Marked(Tensor):
    """Tensors of a library's own, as those of images."""


BATCHES: dict[str, Callable[[Tensor], Any]] = {
    "dataclass": Fields,
    "class": Movable,
    "deque": lambda x: deque([x]),
    "subclass": lambda x: x.as_subclass(Marked),
    "array": lambda x: x.numpy(),
    "array of texts": lambda x: np.array([str(float(value)) for value in x]),
    "bytes": lambda x: x.numpy().tobytes(),
    "complex": lambda x: torch.complex(x, x).conj(),
    "nested": lambda x: torch.nested.nested_tensor([x, x[:2]]),
}


class Plain(LightningModule):
    """An ordinary module that looks at no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(torch.ones(1, 1)).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def error_of(batches: DataLoader[Any], *callbacks: Callback) -> str:
    """Text of the error of a run of an ordinary module on two ranks of one replica."""
    try:
        quiet_trainer(MegatronStrategy(tp=2), max_epochs=1, callbacks=list(callbacks)).fit(Plain(), batches)
    except DataError as error:
        return str(error)
    return ""


def errors_of(kind: str) -> tuple[str, str]:
    """Errors of a run with equal batches, and of one in which each rank has its own."""

    def collate(x: Tensor) -> Any:
        beside = x.to_sparse(), np.array([object()]), (value for value in x)  # whose values are not compared
        return [BATCHES[kind](x), *beside]

    def of(own: int) -> str:
        return error_of(DataLoader([torch.arange(4.0) + own] * 2, batch_size=None, collate_fn=collate))  # type: ignore[arg-type]

    return of(0), of(torch.distributed.get_rank())


@pytest.mark.parametrize("kind", list(BATCHES))
def test_values_are_compared_in_whatever_lightning_moves(ranks: Any, kind: str) -> None:
    for same, own in ranks(2, errors_of, kind):
        assert same == ""
        assert "ranks [0, 1] are one replica" in own


def error_where_one_rank_has_no_batch() -> str:
    batch = torch.ones(2) if torch.distributed.get_rank() == 0 else None
    return error_of(DataLoader([0, 1], batch_size=None, collate_fn=lambda _: batch))  # type: ignore[arg-type]


def test_a_rank_that_has_no_batch_is_no_wait_without_end(ranks: Any) -> None:
    for text in ranks(2, error_where_one_rank_has_no_batch):
        assert "ranks [0, 1] are one replica" in text


class Preview(Callback):
    """Moves a batch of its own on rank 0 in each of these hooks, as for a picture in a logger."""

    def _move(self, trainer: Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            trainer.strategy.batch_to_device({"preview": torch.ones(2)})

    on_train_batch_start = on_train_batch_end = _move
    on_validation_start = on_validation_batch_start = on_validation_batch_end = _move
    on_test_batch_start = on_test_batch_end = on_predict_batch_start = on_predict_batch_end = _move


class Evaluated(Plain):
    """An ordinary module that is evaluated, too."""

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def test_step(self, batch: Any, batch_idx: int) -> None: ...

    def predict_step(self, batch: Any, batch_idx: int) -> None: ...


def errors_of_previews() -> list[str]:
    """Texts of the errors of a fit and of evaluations in which rank 0 moves batches of its own."""
    batches, texts = DataLoader([torch.ones(2)] * 3, batch_size=None), []  # type: ignore[arg-type, var-annotated]
    for run in ("fit", "validate", "test", "predict"):
        trainer, module = quiet_trainer(MegatronStrategy(tp=2), max_epochs=1, callbacks=[Preview()]), Evaluated()
        loaders = [batches, batches] if run == "fit" else [batches]
        try:
            getattr(trainer, run)(module, *loaders)
        except DataError as error:
            texts.append(f"{run}: {error}")
    return texts


def test_batches_that_a_callback_moves_are_not_those_of_the_step(ranks: Any) -> None:
    assert ranks(2, errors_of_previews) == [[], []]


class ReadsItself(Plain):
    """A module whose steps read the batches from the iterator themselves."""

    def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)

    def validation_step(self, dataloader_iter: Iterator[Any]) -> None:
        next(dataloader_iter)


def errors_of_iterators(kind: str) -> tuple[str, str]:
    """Errors of a run with equal batches, and of one in which each rank has its own in training or validation."""

    def of(own: int) -> str:
        rows = [DataLoader([torch.ones(2) + n * own for n in (1, 2, 3)], batch_size=None) for _ in range(2)]  # type: ignore[arg-type, var-annotated]
        same = DataLoader([torch.ones(2)] * 3, batch_size=None)  # type: ignore[arg-type, var-annotated]
        rows[1 if kind == "training" else 0] = same
        try:
            quiet_trainer(MegatronStrategy(tp=2), max_epochs=1).fit(ReadsItself(), *rows)
        except DataError as error:
            return str(error)
        return ""

    return of(0), of(torch.distributed.get_rank())


@pytest.mark.parametrize("kind", ["training", "validation"])
def test_batches_that_a_step_reads_itself_are_compared(ranks: Any, kind: str) -> None:
    for same, own in ranks(2, errors_of_iterators, kind):
        assert same == ""
        assert "ranks [0, 1] are one replica" in own
