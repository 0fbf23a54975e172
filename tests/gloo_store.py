"""Requests to the store, and connections, of gloo groups of many ranks: each rank is a thread of this process.

``python tests/gloo_store.py 8 16`` prints a line of JSON for each size. torch reads its variables once a process.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=120)


class CountingStore(dist.Store):
    """A store in memory that counts requests, and the bytes of values."""

    def __init__(self) -> None:
        super().__init__()
        self._inner, self._lock, self.counts = dist.HashStore(), Lock(), Counter[str]()

    def _count(self, name: str, size: int = 0) -> None:
        with self._lock:
            self.counts += Counter({name: 1, "bytes": size})

    def set(self, key: str, value: Any) -> None:
        """Keep a value."""
        self._count("set", len(value))
        self._inner.set(key, value)

    def get(self, key: str) -> Any:
        """A value."""
        value = self._inner.get(key)
        self._count("get", len(value))
        return value

    def wait(self, keys: list[str], timeout: timedelta = TIMEOUT) -> None:
        """Wait for keys."""
        self._count("wait")
        self._inner.wait(keys, timeout)


def sockets() -> int:
    """Open sockets of this process."""
    return sum(os.path.realpath(f"/proc/self/fd/{name}").count("socket:") for name in os.listdir("/proc/self/fd"))


def measured(size: int) -> dict[str, int]:
    """Counts of a group's start and first collectives: a sum, a gather, a broadcast, a barrier."""
    store, before = CountingStore(), sockets()

    def on_every_rank(step: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(step, range(size)))

    groups = on_every_rank(lambda rank: dist.ProcessGroupGloo(store, rank, size, TIMEOUT))
    start = sum(store.counts[name] for name in ("set", "get", "wait"))

    def communicate(rank: int) -> float:
        group, total = groups[rank], torch.tensor([float(rank)])
        group.allreduce([total]).wait()
        group.allgather([[torch.zeros(1) for _ in range(size)]], [torch.ones(1)]).wait()
        root = dist.BroadcastOptions()
        root.rootRank, root.rootTensor = 0, 0
        group.broadcast([torch.ones(1)], root).wait()
        group.barrier().wait()
        return total.item()

    assert set(on_every_rank(communicate)) == {size * (size - 1) / 2}
    all_of_it = sum(store.counts[name] for name in ("set", "get", "wait"))
    return {"start": start, "all": all_of_it, "bytes": store.counts["bytes"], "sockets": sockets() - before}


if __name__ == "__main__":
    for number in map(int, sys.argv[1:]):
        print(json.dumps(measured(number)), flush=True)
    os._exit(0)  # each group would wait for the others of this process to leave
