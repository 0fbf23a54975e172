"""Check at each batch that the data end on all ranks or on none."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch

from lightning_megatron.comm.collectives import MAX, Pending, start_all_reduce_in_place
from lightning_megatron.comm.objects import all_gather_object_over
from lightning_megatron.errors import DataError
from lightning_megatron.mesh import Axis


class DataState(IntEnum):
    """State of a rank's data at a batch: ended before it, last batch, or more to come."""

    ENDED = 0
    LAST = 1
    MORE = 2


Ending = tuple[int, DataState, int]
"""A rank, the state of its data, and its number of batches."""


class EndOfDataCheck:
    """Compares the state of data over ranks, with one all-reduce per batch that overlaps with computing.

    Args:
        hosts: axis of the ranks that wait for each other; ``None`` to check nothing.
        data: description of the data: ``"training data"``.
        limit: argument of the Trainer that limits the batches.
    """

    def __init__(self, hosts: Axis | None = None, data: str = "", limit: str = "") -> None:
        self._hosts, self._data, self._limit = hosts, data, limit
        self._under_way: tuple[Pending, DataState, int] | None = None

    def begin(self, coming: DataState, batches: int) -> None:
        """Send the state of this rank's data at a batch, and its number. Every rank of the group must call this."""
        if self._hosts is not None:
            self.settle()
            vote = torch.tensor([int(coming), -int(coming)])
            self._under_way = start_all_reduce_in_place(vote, self._hosts, MAX), coming, batches

    def settle(self) -> None:
        """Wait for the states of the other ranks.

        Raises:
            DataError: on all ranks of the group, if the states differ.
        """
        if self._under_way is None or self._hosts is None:
            return
        vote, coming, batches = self._under_way
        self._under_way = None
        most, least = vote.wait().tolist()
        if most != -least:
            own = self._hosts.ranks[self._hosts.rank], coming, batches
            raise uneven_error(self._data, self._limit, all_gather_object_over(self._hosts, own))


def uneven_error(data: str, limit: str, endings: Sequence[Ending]) -> DataError:
    """Error for ranks whose data end after different numbers of batches; :class:`EndOfDataCheck` explains the texts."""
    ended: dict[int, list[int]] = {}
    for rank, coming, batches in endings:
        if coming != DataState.MORE:
            ended.setdefault(batches, []).append(rank)
    going = [rank for rank, coming, _ in endings if coming == DataState.MORE]
    parts = [f"after {count} batches on {_rank_list(ranks)}" for count, ranks in sorted(ended.items())]
    parts += [f"later on {_rank_list(going)}"] if going else []
    return DataError(
        f"the {data} end {' and '.join(parts)}. Ranks wait for each other in every step, so all need equally many"
        f" batches: leave out what is over, repeat samples, or set Trainer({limit}=...) to what every rank has"
    )


def _rank_list(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
