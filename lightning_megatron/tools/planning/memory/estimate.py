"""The memory that a rank is predicted to need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_megatron.tools.planning.core.term import Term


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of tensors on one rank at the fullest moment of a step, without the device's own workspace.

    Attributes:
        by_cause: bytes at that moment by cause, such as ``"parameters"``, ``"gradients"``, ``"activations of
            attention"``; they sum to ``peak``.
        peak: bytes at the fullest moment.
        moment: the fullest moment, such as ``"backward of stage 0"``.
        after_step: bytes that stay from one step to the next.
        terms: the formulas behind ``by_cause``.
    """

    by_cause: Mapping[str, int]
    peak: int
    moment: str
    after_step: int
    terms: tuple[Term, ...] = ()

    @property
    def largest_cause(self) -> str:
        """The cause with most bytes."""
        return max(self.by_cause, key=lambda cause: self.by_cause[cause])
