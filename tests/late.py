"""Collectives that run when somebody waits for them, and not before: what a fast machine hides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.comm.collectives import Pending, local_shard
from lightning_megatron.mesh import Axis
from lightning_megatron.optim.buffers import bucket as buckets
from lightning_megatron.recorder.call import Call


class _WhenWaitedFor:
    """A gather that has not begun."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run = run

    def wait(self) -> None:
        self._run()

    def is_completed(self) -> bool:
        return False


@contextmanager
def late_gathers() -> Iterator[None]:
    """Let whoever does not wait for a parameter see its value of the step before."""
    at_once = buckets.start_all_gather_in_place

    def late(whole: Tensor, axis: Axis) -> Pending:
        own = local_shard(whole, axis)
        before = own.clone()

        def run() -> None:
            own.copy_(before)
            at_once(whole, axis).wait()

        return Pending(whole, _WhenWaitedFor(run))

    buckets.start_all_gather_in_place = late
    try:
        yield
    finally:
        buckets.start_all_gather_in_place = at_once


@contextmanager
def late_collectives() -> Iterator[None]:
    """Run every collective that goes on beside computation when somebody waits for it, with what its input is then.

    So its result is not there too early, and an input that has changed meanwhile shows. Messages of pipelines are sent
    at once, since the other side waits for them; that nothing has written into one is asserted when it was sent.
    """
    issue = Call.issue

    def late(call: Call, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if function is dist.isend:
            return _Unchanged(issue(call, function, *args, **kwargs), args[0])
        # Votes, which are maxima, are asked whether they have ended.
        is_vote = any(isinstance(arg, dist.ReduceOp.RedOpType) for arg in args)
        if is_vote or not kwargs.get("async_op"):
            return issue(call, function, *args, **kwargs)
        return _WhenWaitedFor(lambda: issue(call, function, *args, **kwargs).wait())

    Call.issue = late  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Call.issue = issue  # type: ignore[method-assign]


class _Unchanged:
    """A message whose tensor must stay as it is until it was sent."""

    def __init__(self, work: Any, sent: Tensor) -> None:
        self._work, self._sent, self._before = work, sent, sent.detach().clone()

    def wait(self) -> None:
        self._work.wait()
        assert torch.equal(self._sent, self._before), "a message was written into before it was sent"

    def is_completed(self) -> bool:
        done: bool = self._work.is_completed()
        return done
