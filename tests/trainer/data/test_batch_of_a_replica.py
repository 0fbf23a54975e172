"""Ranks of one replica that read different samples end with an error that names them; others train on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
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
        "own in validation": same,
    }
    trainer = quiet_trainer(MegatronStrategy(**axes), max_epochs=2, use_distributed_sampler=False)
    module = LlamaModule("llama-tiny", **SIZES, num_query_groups=2)
    validation = Rows(rank if kind == "own in validation" else 0)
    if kind == "own in the second epoch":
        module.on_train_epoch_end = lambda: vars(same).update(_own=rank)  # type: ignore[method-assign]
    try:
        trainer.fit(module, DataLoader(data[kind], 2), DataLoader(validation, 2))
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
        ("pp", "own in validation"),
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
