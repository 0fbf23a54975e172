"""Hosts tell each other at each batch whether their data go on."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from lightning_megatron.comm.collectives import Pending
from lightning_megatron.errors import DataError
from lightning_megatron.mesh import Axis
from lightning_megatron.recorder.file_format import Kind


class Next(IntEnum):
    """A rank's word on how its data go on."""

    NOTHING = 0
    LAST = 1
    MORE = 2


Ending = tuple[int, Next, int]
"""A rank, how its data go on, and after how many batches."""


class StreamVote:
    """One message a batch, which is under way while ranks compute.

    Args:
        hosts: of ranks that wait for each other; ``None`` for a rank that waits for no other.
        data: in words: ``"training data"``.
        limit: argument of the Trainer that limits them.
    """

    def __init__(self, hosts: Axis | None = None, data: str = "", limit: str = "") -> None:
        self._hosts, self._data, self._limit = hosts, data, limit
        self._under_way: tuple[Pending, Next, int] | None = None

    def begin(self, coming: Next, batches: int) -> None:
        """Send this rank's part. Every rank of the group must call this.

        Args:
            coming: at this batch, or where there should be one.
            batches: so far, this one included.
        """
        if self._hosts is not None:
            self.settle()
            vote = torch.tensor([int(coming), -int(coming)])
            call, group = self._hosts.call(Kind.ALL_REDUCE, vote), self._hosts.group
            work = call.issue(dist.all_reduce, vote, dist.ReduceOp.MAX, group=group, async_op=True)
            self._under_way = Pending(vote, work, call), coming, batches

    def settle(self) -> None:
        """Hear the others' parts.

        Raises:
            DataError: on all ranks of the group, if these are not the same.
        """
        if self._under_way is None or self._hosts is None:
            return
        vote, coming, batches = self._under_way
        self._under_way = None
        most, least = vote.wait().tolist()
        if most != -least:
            endings: list[Any] = [None] * self._hosts.size
            own = self._hosts.ranks[self._hosts.rank], coming, batches
            self._hosts.call(Kind.ALL_GATHER_OBJECT).run(dist.all_gather_object, endings, own, group=self._hosts.group)
            raise uneven(self._data, self._limit, endings)


def uneven(data: str, limit: str, endings: Sequence[Ending]) -> DataError:
    """The error for ranks whose data end after different numbers of batches.

    Args:
        data: in words: ``"training data"``.
        limit: argument of the Trainer that limits them.
        endings: of the ranks that wait for each other.
    """
    ended: dict[int, list[int]] = {}
    for rank, coming, batches in endings:
        if coming != Next.MORE:
            ended.setdefault(batches, []).append(rank)
    going = [rank for rank, coming, _ in endings if coming == Next.MORE]
    parts = [f"after {count} batches on {_told(ranks)}" for count, ranks in sorted(ended.items())]
    parts += [f"later on {_told(going)}"] if going else []
    return DataError(
        f"the {data} end {' and '.join(parts)}. Ranks wait for each other in every step, so all need equally many"
        f" batches: leave out what is over, repeat samples, or set Trainer({limit}=...) to what every rank has"
    )


def _told(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
