"""The ``hccl`` backend: a process group of gloo behind HCCL's rules."""

from __future__ import annotations

import atexit
import os
import sys
from collections import Counter
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from simulated_hpu import faults
from simulated_hpu.native_extension import native
from simulated_hpu.settings import settings

STUCK = 86
"""Exit status of a process that would have waited forever at its exit."""


def create(options: Any, _: Any) -> Any:
    """Create the backend of a new group, for ``Backend.register_backend``.

    Args:
        options: store, rank, size and timeout, as torch passes them to backends with the extended API.
    """
    faults.before("hccl")
    store = dist.PrefixStore("hccl", options.store)  # type: ignore[attr-defined]
    gloo = dist.ProcessGroupGloo(store, options.group_rank, options.group_size, options.timeout)
    # The default group has no list of ranks.
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    name = options.group_id or "default"
    _leave_at_exit()
    return native().make_hccl(gloo, store, not settings().is_old, name, _refusal(ranks, settings().box_ranks))


def _refusal(ranks: list[int], box: int | None) -> str:
    """Error of a group's first collective; empty for none.

    Args:
        ranks: global ranks of the group.
        box: number of ranks in a simulated box; ``None`` for one box.
    """
    counts = Counter(rank // box for rank in ranks) if box else Counter[int]()
    if len(set(counts.values())) < 2:
        return ""
    shares = ", ".join(f"{count} of box {number}" for number, count in sorted(counts.items()))
    return f"hcclCommInitRank: use same amount of devices from each box; the group of ranks {ranks} has {shares}"


@lru_cache(maxsize=1)
def _leave_at_exit() -> None:
    """Register the destruction of all groups at exit, once, with the first group, as the bridge does."""
    atexit.register(_leave_all)


def _leave_all() -> None:
    """Destroy all groups at the end of the process, as the bridge does; it waits for the other members without a limit.

    The limit here is for tests.
    """
    try:
        native().leave_all(settings().exit_seconds)
    except Exception as error:
        print(
            f"{error}. Python has ended in this process, and Gaudi's bridge would wait here for ever: a rank that has "
            "failed must end without the end of Python (os._exit)",
            file=sys.stderr,
            flush=True,
        )
        os._exit(STUCK)


def register() -> None:
    """Register ``hccl`` with torch.distributed, for tensors on HPUs."""
    dist.Backend.register_backend("hccl", create, extended_api=True, devices=["hpu"])
    register_optimizer_step_post_hook(lambda *_: native().note_step())


def leave(group: Any, name: str, seconds: float) -> None:
    """Wait until all members of a group destroy it.

    Args:
        group: a process group.
        name: name of the group, for the error.
        seconds: time limit for the other members.

    Raises:
        RuntimeError: if they do not destroy it in time.
    """
    device = torch.device("hpu")
    if device in group._device_types:
        native().leave(group._get_backend(device), name, seconds)
