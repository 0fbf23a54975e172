"""Exchange of texts between ranks through the rendezvous store, before there are process groups."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, but no stub says so

__all__ = ["Meeting", "Store", "comes_true"]


class Meeting:
    """A named exchange between all ranks through one store.

    Args:
        store: store that all ranks can reach.
        rank: rank of this process.
        world_size: number of ranks.
        name: name of the exchange, equal on all ranks. A second object of that name is a separate exchange.
    """

    def __init__(self, store: Store, rank: int, world_size: int, name: str) -> None:
        named = PrefixStore(f"lightning_megatron/{name}", store)
        # Every rank has its own counter; they agree, since all ranks take part equally often.
        self._store = PrefixStore(str(named.add(f"meetings of {rank}", 1)), named)
        self._rank, self._size, self._rounds = rank, world_size, 0

    def judged(self, own: str, judge: Callable[[Sequence[str]], str]) -> str:
        """Submit a text, and return rank 0's verdict on the texts of all ranks. Every rank must call this.

        Args:
            own: this rank's text.
            judge: function that computes the verdict, called on rank 0 with the texts of all ranks.
        """
        self._rounds += 1
        said = PrefixStore(f"round {self._rounds}", self._store)
        said.set(str(self._rank), own)
        if self._rank == 0:
            said.set("judgement", judge([said.get(str(rank)).decode() for rank in range(self._size)]))
        return said.get("judgement").decode()

    def all_say(self, own: str, limit: timedelta) -> bool:
        """Submit a text; True if rank 0 finds that all ranks submit the same one in time. A rank need not call this.

        It waits for the others as long as the limit allows.
        """
        said, ranks = PrefixStore("all say", self._store), [str(rank) for rank in range(self._size)]
        said.set(str(self._rank), own)
        end = time.monotonic() + limit.total_seconds()
        try:
            # Polling, because torch prints two lines for a wait that times out.
            if self._rank == 0 and comes_true(lambda: said.check(ranks), end):
                said.set("judgement", str(len({said.get(rank) for rank in ranks}) == 1))
            return comes_true(lambda: said.check(["judgement"]), end) and said.get("judgement") == b"True"
        except RuntimeError:  # the process that hosts the store has ended
            return False

    def part(self) -> None:
        """Wait on rank 0, whose process may host the store, until all ranks have called this."""
        if self._store.add("parted", 1) == self._size:
            self._store.set("all have parted", "")
        if self._rank == 0:
            self._store.wait(["all have parted"])


def comes_true(holds: Callable[[], bool], end: float) -> bool:
    """Poll a condition until it holds; False if it does not hold by the monotonic time ``end``."""
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
