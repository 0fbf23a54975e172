"""Copies of a strategy, which a callback that knows its Trainer leads to."""

from __future__ import annotations

import copy
from typing import Any

from lightning.pytorch.strategies import ParallelStrategy

from lightning_megatron.lightning.strategy.ranks import JobRanks


class SharedOnceStarted(ParallelStrategy):
    """A strategy of which there is one in a process, from the start of its run on: copies of what holds it share it.

    Process groups, threads and locks of folders have no copies, and two strategies cannot update one set of buffers.
    """

    _ranks: JobRanks

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedOnceStarted:
        if self._ranks.is_connected:
            return self
        memo[id(self)] = copied = type(self).__new__(type(self))
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied
