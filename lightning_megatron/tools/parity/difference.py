"""The first difference between two records of one training, and where it begins."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SMALL = 1e-3
"""Share of the whole gradient's norm: the tolerance of smaller gradients is relative to this share, since a bias whose
gradient is 0 in exact arithmetic has some rounding."""


@dataclass(frozen=True)
class Output:
    """A layer's output in one step, over all ranks.

    Attributes:
        rms: root mean square of the values.
        signed: mean of the values with random signs.
        count: number of values over all ranks; a value that several ranks hold counts several times.
        tp: number of tensor-parallel ranks.
        spread: largest difference between ranks of a tensor-parallel group in the root mean square, or in the sum with
            random signs over the root of the count. It is 0 where each rank holds the whole output.
        signs: name of the random signs.
    """

    rms: float
    signed: float
    count: int
    tp: int = 1
    spread: float = 0.0
    signs: str = ""

    def shared_count(self, other: Output, tolerance: float) -> int:
        """Number of values of the output, whole on every tensor-parallel rank or sharded; 0 if it cannot be compared.

        A rank may also hold a partial sum, of the size of the whole: then ranks differ, and it is not comparable.

        Args:
            other: output of the same layer in the other layout.
            tolerance: relative difference that is rounding.
        """
        both = ({float(x.count), x.count / x.tp} for x in (self, other))
        count = int(max(set.intersection(*both), default=0))
        parts = any(count < x.count and x.spread > tolerance * x.rms for x in (self, other))
        return 0 if parts else count


@dataclass(frozen=True)
class Step:
    """One optimizer step in numbers that no layout changes.

    Attributes:
        loss: mean loss of its batches.
        grad_norm: norm of the gradient.
        outputs: each layer's output, in the order of the forward.
        gradients: norm of each parameter's gradient.
    """

    loss: float
    grad_norm: float
    outputs: Mapping[str, Output]
    gradients: Mapping[str, float]

    @classmethod
    def of(cls, contents: Mapping[str, Any]) -> Step:
        """The step that a file holds."""
        outputs = {name: Output(**output) for name, output in contents["outputs"].items()}
        return cls(contents["loss"], contents["grad_norm"], outputs, contents["gradients"])


@dataclass(frozen=True)
class Difference:
    """A number that differs.

    Attributes:
        step: number of the step, from 0.
        kind: ``"output"``, ``"gradient"``, ``"loss"`` or ``"grad_norm"``.
        name: layer or parameter; empty for a loss or a norm.
        first: value of the first record; NaN if it has none.
        second: value of the second one.
        measure: measure of an output, such as its root mean square.
    """

    step: int
    kind: str
    name: str
    first: float
    second: float
    measure: str = ""

    def __str__(self) -> str:
        """The place and both values, in words."""
        numbers = f"{self.first:.7g} and {self.second:.7g}"
        if self.kind == "output":
            return f"step {self.step}: the forward of {self.name}: its output is {numbers} ({self.measure})"
        if self.kind == "gradient":
            return f"step {self.step}: the backward at {self.name}: the norm of its gradient is {numbers}"
        return f"step {self.step}: the {self.kind.replace('_', ' ')}: {numbers}"


def first_difference(first: Sequence[Step], second: Sequence[Step], tolerance: float) -> Difference | None:
    """The earliest number that differs, in the order in which a step computes them; ``None`` if all agree.

    After a fault in one layer everything that follows differs. So the forward is compared from the first layer on, and
    the backward from the last one.

    Args:
        first: steps of one run.
        second: steps of the other.
        tolerance: relative difference that is rounding.
    """
    for number, (a, b) in enumerate(zip(first, second, strict=False)):
        for pair, scale in _pairs(number, a, b, tolerance):
            x, y = pair.first, pair.second
            if x != y and not abs(x - y) <= tolerance * max(abs(x), abs(y), scale) < math.inf:  # NaN differs, too
                return pair
    return None


def not_compared(first: Step, second: Step, tolerance: float) -> list[str]:
    """Layers whose outputs cannot be compared.

    Args:
        first: a step of one run.
        second: step of the same number in the other run.
        tolerance: relative difference that is rounding.
    """
    a, b = first.outputs, second.outputs
    return [
        name for name in {**b, **a} if name not in a or name not in b or not a[name].shared_count(b[name], tolerance)
    ]


def _pairs(step: int, a: Step, b: Step, tolerance: float) -> Iterator[tuple[Difference, float]]:
    """Pairs of numbers in the order of a step, each with the scale for the tolerance of small ones."""
    left_out = not_compared(a, b, tolerance)
    for name in b.outputs:  # the second layout often is one process, which has them all in their order
        if name not in left_out:
            x, y = a.outputs[name], b.outputs[name]
            yield Difference(step, "output", name, x.rms, y.rms, "root mean square"), 0.0
            if x.signs == y.signs and math.isfinite(x.rms):
                root = math.sqrt(x.shared_count(y, tolerance))
                signed = x.signed * root, y.signed * root
                yield Difference(step, "output", name, *signed, "sum with random signs"), x.rms
    yield Difference(step, "loss", "", a.loss, b.loss), 0.0
    nan, small = float("nan"), _SMALL * max(a.grad_norm, b.grad_norm)
    for name in sorted({**a.gradients, **b.gradients}, key=_depth, reverse=True):
        yield Difference(step, "gradient", name, a.gradients.get(name, nan), b.gradients.get(name, nan)), small
    yield Difference(step, "grad_norm", "", a.grad_norm, b.grad_norm), 0.0


def _depth(name: str) -> tuple[float, str]:
    """Place of a parameter in the forward: embedding, layers by number, all that follows."""
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    if numbers:
        return numbers[0], name
    return (-1.0 if "embedding" in name else float("inf")), name
