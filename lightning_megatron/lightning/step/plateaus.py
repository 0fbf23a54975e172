"""One decision of all ranks on learning rates that wait for a plateau."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim.lr_scheduler import ReduceLROnPlateau


def decide_on_rank_0(configs: Iterable[LRSchedulerConfig], broadcast: Callable[[float], float]) -> None:
    """Let ``ReduceLROnPlateau`` see rank 0's metric on all ranks, so that parts of one model keep one learning rate.

    A metric that is not logged with ``sync_dist=True`` may have a value of its own on each rank.

    Args:
        configs: Lightning's configurations of schedulers; those in question get one that shares the user's state.
        broadcast: function that gives all ranks the value of rank 0.
    """

    def step(self: ReduceLROnPlateau, metrics: Any, *args: Any, **kwargs: Any) -> None:
        super(type(self), self).step(broadcast(float(metrics)), *args, **kwargs)

    for config in configs:
        if isinstance(config.scheduler, ReduceLROnPlateau):
            kind = type(config.scheduler)
            agreed = object.__new__(type(kind.__name__, (kind,), {"step": step, "__module__": kind.__module__}))
            agreed.__dict__ = config.scheduler.__dict__
            config.scheduler = agreed
