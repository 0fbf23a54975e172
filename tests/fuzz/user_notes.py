"""What a program of ``user_programs.py`` saw and found, as plain data."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from user_batches import Batch


class Notes:
    """Notes by place (``train 0.3``: epoch and batch); micro-batches of a batch are put together.

    Attributes:
        samples: numbers and names of the samples of a place.
        rates: learning rates at a place.
        losses: losses of a place, with the samples that each is a mean over.
        dtypes: dtypes of losses.
        last: values at the end, by name.
    """

    def __init__(self) -> None:
        self.samples: dict[str, list[Any]] = {}
        self.rates: dict[str, list[float]] = {}
        self.losses: dict[str, list[tuple[float, int]]] = {}
        self.dtypes: dict[str, str] = {}
        self.last: dict[str, Any] = {}

    def sees(self, where: str, batch: Batch, rates: list[float]) -> None:
        """Note the samples of a step."""
        lengths = () if batch.lengths is None else batch.lengths.tolist()
        numbers = batch.number.tolist()
        self.samples.setdefault(where, []).extend(numbers)
        if batch.names:
            self.samples.setdefault(f"{where} names", []).extend(batch.names)
        self.samples.setdefault(f"{where} lengths", []).extend(lengths)
        self.rates[where] = rates

    def finds(self, where: str, loss: Tensor, samples: int) -> None:
        """Note a loss."""
        self.losses.setdefault(where, []).append((float(loss.detach()), samples))
        self.dtypes[where] = str(loss.dtype)

    def ends(self, name: str, value: Any) -> None:
        """Note a value that a later one replaces."""
        self.last[name] = value

    def plain(self) -> dict[str, Any]:
        """All of it, with one loss for each place."""
        losses = {}
        for where, parts in self.losses.items():
            losses[where] = sum(loss * count for loss, count in parts) / sum(count for _, count in parts)
        return {
            "samples": self.samples,
            "rates": self.rates,
            "losses": losses,
            "loss dtypes": self.dtypes,
            "own values": self.last,
        }
