"""Before a group is given up."""

from __future__ import annotations

import torch.distributed as dist


def settle(group: dist.ProcessGroup | None) -> None:
    """Let the threads of a gloo group let go of the tensors of earlier collectives; all its ranks call this.

    Up to torch 2.6 a group is freed with Python's lock in hand, and waits there for its threads. One that has yet to
    free a tensor needs that lock: the job hangs. A barrier holds no tensor, and comes after all that was begun before.
    """
    dist.barrier(group)
