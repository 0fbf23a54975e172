"""Terms of an estimate, with their formulas as text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Term:
    """One summand of an estimate, with the formula that it comes from.

    Attributes:
        name: name of the cause, such as ``"gradients"``.
        formula: formula in words and letters, such as ``"4 bytes x parameters of this rank"``.
        value: value of the formula for the job at hand.
        unit: unit of the value: ``"bytes"``, ``"s"``, ``"FLOP"``.
    """

    name: str
    formula: str
    value: float
    unit: str
