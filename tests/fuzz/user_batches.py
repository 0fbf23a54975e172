"""Data of the programs of ``user_programs.py``, and the forms in which users write a batch."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, random_split
from user_grammar import Program

FEATURES, LENGTH, WORDS, CLASSES = 12, 6, 20, 5
SAMPLES, ODD, HELD_OUT, BATCH, MICRO_BATCH = 24, 26, 12, 4, 2


@dataclass
class Batch:
    """What a step needs of a batch, whatever its form."""

    x: Tensor
    tokens: Tensor
    y: Tensor
    number: Tensor
    names: Sequence[str] = ()
    lengths: Tensor | None = None

    def rows(self, rows: slice) -> Batch:
        """Some of its samples."""
        lengths = None if self.lengths is None else self.lengths[rows]
        return Batch(self.x[rows], self.tokens[rows], self.y[rows], self.number[rows], self.names[rows], lengths)


Named = namedtuple("Named", ("x", "tokens", "y", "number"))


class Rows(Dataset[dict[str, Any]]):
    """Samples that differ from one another, with their numbers."""

    def __init__(self, seed: int, count: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, FEATURES, generator=random)
        self.x[::2] += 1.0  # replicas see other statistics
        self.tokens = torch.randint(WORDS, (count, LENGTH), generator=random)
        self.y = (self.x.sum(1) + self.tokens.sum(1)).long() % CLASSES

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"x": self.x[number], "tokens": self.tokens[number], "y": self.y[number], "number": number}


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    stacked = {name: torch.stack([row[name] for row in rows]) for name in ("x", "tokens", "y")}
    return {**stacked, "number": torch.tensor([row["number"] for row in rows])}


def _names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"sample {row['number']}" for row in rows]


def _ragged(rows: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    return [row["x"][: 1 + row["number"] % 5] for row in rows]


def _nested(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found = _columns(rows)
    return {"inputs": {"x": found["x"], "tokens": found["tokens"]}, "target": (found["y"], [found["number"]])}


MAKE: Mapping[str, Callable[[Sequence[Mapping[str, Any]]], Any]] = {
    "tuple": lambda rows: tuple(_columns(rows).values()),
    "list": lambda rows: list(_columns(rows).values()),
    "dict": _columns,
    "nested": _nested,
    "namedtuple": lambda rows: Named(**_columns(rows)),
    "named": lambda rows: {**_columns(rows), "names": _names(rows)},
    "arrays": lambda rows: {**_columns(rows), "ids": np.array([row["number"] for row in rows])},
    "dataclass": lambda rows: Batch(**_columns(rows), names=_names(rows)),
    "ragged": lambda rows: {**_columns(rows), "parts": _ragged(rows)},
}
READ: Mapping[str, Callable[[Any], Batch]] = {
    "nested": lambda batch: Batch(**batch["inputs"], y=batch["target"][0], number=batch["target"][1][0]),
    "dict": lambda batch: Batch(**batch),
    "named": lambda batch: Batch(**batch),
    "dataclass": lambda batch: batch,
}


def read(batch: Any, form: str) -> Batch:
    """The parts of a batch of some form."""
    if form in ("tuple", "list", "namedtuple"):
        return Batch(*batch)
    if form == "ragged":
        lengths = torch.tensor([len(part) for part in batch["parts"]])
        return Batch(**{name: batch[name] for name in ("x", "tokens", "y", "number")}, lengths=lengths)
    if form == "arrays":
        names = [f"sample {number}" for number in batch["ids"].tolist()]
        return Batch(**{name: batch[name] for name in ("x", "tokens", "y", "number")}, names=names)
    return READ[form](batch)


class Collate:
    """Makes batches of a form; a class, so that it can be pickled."""

    def __init__(self, form: str) -> None:
        self.form = form

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        return MAKE[self.form](rows)


def loaders(program: Program) -> Iterator[DataLoader[Any]]:
    """A loader of training data, and one of held-out data."""
    collate = Collate(program["batch"])
    rows: Dataset[Any] = Rows(program.seed, ODD if "odd" in program else SAMPLES)
    if "split" in program:
        rows, _ = random_split(rows, [0.5, 0.5])
    yield DataLoader(rows, BATCH, shuffle="shuffle" in program, collate_fn=collate)
    yield DataLoader(Rows(program.seed + 1, HELD_OUT), BATCH, collate_fn=collate)
