"""Messages of a rank, counted and timed by axis and kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

from lightning_megatron.mesh import Axis, ParallelMesh
from lightning_megatron.recorder.file_format import Kind
from lightning_megatron.recorder.recorder import ActionLog, Recorder


class Traffic(NamedTuple):
    """One kind of collective or message on one axis.

    Attributes:
        axis: name of the axis.
        kind: kind of the collective.
    """

    axis: str
    kind: str


@dataclass
class Amount:
    """Size of some traffic.

    Attributes:
        number: number of collectives or messages.
        size: bytes of their tensors.
        waited: seconds in which the main thread waited for their ends.
    """

    number: int = 0
    size: int = 0
    waited: float = 0.0


class TrafficLog(ActionLog):
    """Log that also sums up the collectives and messages of its rank.

    It replaces the recorder's log before the mesh is created: ``recorder.main = TrafficLog(recorder, 0)``.

    Args:
        recorder: recorder of the rank.
        number: number of the thread.
    """

    def __init__(self, recorder: Recorder, number: int = 0) -> None:
        super().__init__(recorder, number)
        self._amounts: dict[tuple[int, int], Amount] = defaultdict(Amount)
        self._begun: dict[int, tuple[Amount, float]] = {}

    def begin(
        self, kind: int, group: int = 0, size: int = 0, peer: int = -1, waits: bool = True, detail: bool = False
    ) -> int:
        """Count a collective or message; other actions are logged only."""
        token = super().begin(kind, group, size, peer, waits, detail)
        if kind >= Kind.ALL_REDUCE:
            amount = self._amounts[group, kind]
            amount.number += 1
            amount.size += size
            self._begun[token >> 4] = amount, perf_counter()
        return token

    def wait(self, token: int) -> int:
        """Start timing a wait for a collective that is already running."""
        number = token >> 4
        if number in self._begun:
            self._begun[number] = self._begun[number][0], perf_counter()
        return super().wait(token)

    def end(self, token: int) -> None:
        """Add the time of a wait."""
        if begun := self._begun.pop(token >> 4, None):
            begun[0].waited += perf_counter() - begun[1]
        super().end(token)

    def take(self, mesh: ParallelMesh) -> Mapping[Traffic, Amount]:
        """Traffic since the last call.

        Args:
            mesh: mesh of the rank, which knows the names of the axes.
        """
        names = {axis.number: name for name, axis in vars(mesh).items() if isinstance(axis, Axis)}
        found = {
            Traffic(names.get(group, "other"), Kind(kind).name.lower()): amount
            for (group, kind), amount in sorted(self._amounts.items())
        }
        self._amounts.clear()
        return found
