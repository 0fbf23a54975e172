"""Before a group is given up."""

from __future__ import annotations

import time

import torch.distributed as dist
from lightning_utilities.core.imports import RequirementCache

_FREED_WITHOUT_THE_LOCK = bool(RequirementCache("torch>=2.7"))


def settle(group: dist.ProcessGroup | None) -> None:
    """Let the threads of a gloo group let go of the tensors of earlier collectives; all its ranks call this.

    Up to torch 2.6 a group is freed with Python's lock in hand, and waits there for its threads. One that has yet to
    free a tensor needs that lock: the job hangs. A barrier holds no tensor, and comes after all that was begun before;
    but a group has two threads, and the one that has not served the barrier is given a moment.
    """
    dist.barrier(group)
    if not _FREED_WITHOUT_THE_LOCK:
        time.sleep(0.1)
