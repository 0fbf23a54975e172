"""Differences between the records of two runs of a program of ``user_programs.py``, with their tolerances."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from user_grammar import Program
from user_runs import SAVED_EVERY, Outcome

MISSING = object()
LAST_STAGE = ("losses", "loss dtypes", "predictions", "callback_metrics", "logged", "callbacks", "own values")
"""Subjects of which only the last stage of a pipeline knows all."""
OF_OUR_MODULES = ("grad_norm",)
"""Names that our modules log under our strategy alone."""
NUMBER = re.compile(r"\d+\.\d+")
OF_MOVED, MOST_ROUNDED = 4, 20
IN_MEMORY = ("weights in memory", "buffers in memory")


@dataclass(frozen=True)
class Difference:
    """One difference.

    Attributes:
        subject: kind of observation.
        place: where in it.
        stock: Lightning's value.
        ours: our value.
    """

    subject: str
    place: str
    stock: object
    ours: object

    def __str__(self) -> str:
        return f"{self.subject} {self.place}: {_short(self.ours)} for {_short(self.stock)}"


def _short(value: object) -> str:
    return str(value.flatten()[:4].tolist() if isinstance(value, Tensor) else value)[:160]


@dataclass(frozen=True)
class Tolerance:
    """Largest differences of numbers, relative and absolute."""

    relative: float
    absolute: float

    def admits(self, stock: Tensor, ours: Tensor) -> bool:
        """True if two tensors are close."""
        return torch.allclose(ours.double(), stock.double(), rtol=self.relative, atol=self.absolute, equal_nan=True)


def tolerance_of(program: Program) -> Tolerance:
    """Tolerance of numbers after the ten steps or so of a program.

    fp32 rounds at 6e-8, and sums over ranks and micro-batches have another order; optimizers make a hundred of it at
    most (``EPSILON``). bf16 rounds at 4e-3, and stock Lightning rounds in other places: it keeps fp32 parameters.
    """
    if program["precision"] == "bf16-mixed":
        return Tolerance(5e-2, 2e-2)
    return Tolerance(2e-5, 2e-6) if program.alone else Tolerance(2e-4, 2e-5)


def _leaves(stock: Any, ours: Any, place: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(stock, Mapping) and isinstance(ours, Mapping):
        for name in dict.fromkeys([*stock, *ours]):
            yield from _leaves(
                stock.get(name, MISSING), ours.get(name, MISSING), f"{place}/{name}" if place else str(name)
            )
    elif isinstance(stock, list | tuple) and isinstance(ours, list | tuple) and len(stock) == len(ours):
        for number, (first, second) in enumerate(zip(stock, ours, strict=True)):
            yield from _leaves(first, second, f"{place}[{number}]")
    else:
        yield place, stock, ours


def _is_number(value: object) -> bool:
    return isinstance(value, Number) or (isinstance(value, Tensor) and value.numel() == 1)


def _alike(stock: Any, ours: Any, tolerance: Tolerance) -> bool:
    if _is_number(stock) and _is_number(ours):
        return tolerance.admits(torch.tensor(float(stock)), torch.tensor(float(ours)))
    if isinstance(stock, Tensor) and isinstance(ours, Tensor):
        return stock.shape == ours.shape and tolerance.admits(stock, ours)
    if isinstance(stock, str) and isinstance(ours, str):  # callbacks write numbers into their texts
        numbers = [[float(number) for number in NUMBER.findall(text)] for text in (stock, ours)]
        return NUMBER.sub("#", stock) == NUMBER.sub("#", ours) and tolerance.admits(*map(torch.tensor, numbers))
    return type(stock) is type(ours) and bool(stock == ours)


def record_differences(program: Program, stock: Mapping[str, Any], ours: Mapping[str, Any]) -> list[Difference]:
    """Differences of two records.

    Args:
        program: the program.
        stock: Lightning's record.
        ours: ours; subjects that this rank does not know are missing.
    """
    tolerance, found = tolerance_of(program), []
    for subject in ours:
        for place, first, second in _leaves(stock.get(subject, MISSING), ours[subject], ""):
            if not _alike(first, second, tolerance):
                found.append(Difference(subject, place, first, second))
    return found


def _numbers(outcomes: Sequence[Outcome]) -> dict[tuple[int, str, str], Tensor]:
    """Numbers of the records by rank, subject and place."""
    return {
        (rank, subject, place): torch.as_tensor(value).double()
        for rank, outcome in enumerate(outcomes)
        for subject in outcome.record
        for place, value, _ in _leaves(outcome.record[subject], outcome.record[subject], "")
        if _is_number(value) or isinstance(value, Tensor)
    }


def beyond_rounding(
    program: Program, found: Sequence[Difference], stock: Sequence[Outcome], moved: Sequence[Outcome]
) -> list[Difference]:
    """Differences of more than ``OF_MOVED`` times what stock Lightning's number differs by if weights are moved.

    Nothing above ``MOST_ROUNDED`` times the tolerance is taken for rounding, however sensitive a program may be.

    Args:
        program: the program.
        found: differences of its ranks.
        stock: Lightning's outcomes.
        moved: the same with weights moved in their last places; see ``LastPlaces``.
    """
    once = tolerance_of(program)
    most = Tolerance(MOST_ROUNDED * once.relative, MOST_ROUNDED * once.absolute)
    before, after = _numbers(stock), _numbers(moved)
    drift: dict[tuple[str, str], float] = {}
    for (rank, *place), value in before.items():
        other = after.get((rank, *place))
        if value.numel() and other is not None and other.shape == value.shape:
            name = (place[0], place[1])
            drift[name] = max(drift.get(name, 0.0), float((other - value).abs().max()))

    def rounds(difference: Difference) -> bool:
        moves = drift.get((difference.subject, difference.place))
        if moves is None or not isinstance(difference.ours, Tensor | Number):
            return False
        first, ours = torch.as_tensor(difference.stock).double(), torch.as_tensor(difference.ours).double()
        same = first.shape == ours.shape and most.admits(first, ours)
        return same and bool((ours - first).abs().max() <= OF_MOVED * moves)

    return [difference for difference in found if not rounds(difference)]


def in_both(found: Sequence[Difference], others: Sequence[Difference]) -> list[Difference]:
    """Differences whose place is also among others."""
    places = {(each.subject, each.place) for each in others}
    return [each for each in found if (each.subject, each.place) in places]


def _known_on(program: Program, rank: int, ranks: int, outcome: Outcome) -> dict[str, Any]:
    """What a rank of a layout must know."""
    record = dict(outcome.record)
    for subject in {"logged", "callback_metrics"} & record.keys():
        found = record[subject]
        record[subject] = {name: found[name] for name in found if not name.startswith(OF_OUR_MODULES)}
    if "@pp2" in program.words:
        dropped = IN_MEMORY if rank == ranks - 1 else (*LAST_STAGE, *IN_MEMORY)
        record = {subject: value for subject, value in record.items() if subject not in dropped}
    if "ours" in program.words and program.words & {"@tp2", "@pp2"}:
        record = {subject: value for subject, value in record.items() if subject not in IN_MEMORY}
    if program["precision"] != "32-true":  # ours are bf16, with fp32 main values, which checkpoints have
        record.pop("weights in memory", None)
    if rank and program["stop"] != "none" and "cb-average" in program:  # a checkpoint has the averages of rank 0 alone
        record.pop("buffers in memory", None)
    if program["stop"] != "none":  # of steps since the resume, and of files that only a stopped run has
        record.pop("last", None)
        record.pop("callback_metrics", None)
    return record


def faults_of_last(program: Program, outcome: Outcome) -> list[Difference]:
    """``last.ckpt`` must be the newest state under its name alone, whatever stopped the run before."""
    last, steps = outcome.record.get("last"), outcome.record["steps"]
    if last is None or (list(last) == ["last.ckpt"] and last["last.ckpt"] >= steps - steps % SAVED_EVERY):
        return []
    return [Difference("last", "checkpoints", f"last.ckpt of step {steps - steps % SAVED_EVERY} or later", last)]


def differences(program: Program, stock: Sequence[Outcome], ours: Sequence[Outcome]) -> list[Difference]:
    """All differences of a program in its layout; none if it was refused before its first step.

    Args:
        program: the program.
        stock: Lightning's outcomes, one a rank or one for all.
        ours: ours, one a rank.
    """
    errors = [outcome.error for outcome in ours if outcome.error]
    if errors:
        if all(error[0] == "refused" for error in errors):
            return []
        first = min(errors, key=lambda error: any(word in error[1] for word in ("Connection", "gloo", "PeerLost")))
        return [Difference(f"{first[0]}: {first[1].partition(':')[0]}", first[2], "", first[1])]
    found = []
    for rank, outcome in enumerate(ours):
        expected = stock[rank if len(stock) > 1 else 0].record
        found += record_differences(program, expected, _known_on(program, rank, len(ours), outcome))
        found += faults_of_last(program, outcome)
    return found
