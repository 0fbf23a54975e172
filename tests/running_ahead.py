"""CPU ranks whose host does not block in collectives, as with NCCL: ``Work.wait()`` returns at once.

The tensors arrive later, in gloo's threads. The host waits where it reads a number, and also where an operation needs a
tensor that has not arrived: there a device would queue the operation. So a host waits where nothing records it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_megatron.device import collectives

_READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.untyped_storage}
"""Functions that read memory without an operation."""


class _Once:
    """A work that is waited for once: gloo's reduce-scatter copies its result at each wait."""

    def __init__(self, work: Any) -> None:
        self._work: Any = work

    def wait(self) -> bool:
        """Wait, and tell if there was anything to wait for."""
        work, self._work = self._work, None
        had_to = work is not None and not work.is_completed()
        if work is not None:
            _wait(work)
        return had_to


class _InFlight(threading.local):
    """Collectives of this thread that have not ended, by the memory that they use; none without a mode."""

    def __init__(self) -> None:
        self.works: dict[int, list[_Once]] | None = None
        self.waits = 0

    def arrive(self, tensors: Sequence[Tensor] | None = None) -> None:
        """Wait for the tensors; for all by default."""
        assert self.works is not None
        keys = list(self.works) if tensors is None else [_memory(x) for x in tensors]
        for key in keys:
            for work in self.works.pop(key, ()):
                self.waits += work.wait()


_in_flight, _wait = _InFlight(), dist.Work.wait


def _memory(x: Tensor) -> int:
    with torch._C.DisableTorchFunction():
        return x.untyped_storage()._cdata


def _wait_on_the_stream(work: Any, *args: Any, **kwargs: Any) -> bool:
    if _in_flight.works is None:  # a thread of the host alone
        return bool(_wait(work, *args, **kwargs))
    return True


class _Operations(TorchDispatchMode):
    """Lets operations wait for their tensors, and notes the tensors of collectives."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        _in_flight.arrive(tensors)
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            boxed = [x for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, torch.ScriptObject)]
            for work in map(_Once, map(dist.Work.unbox, boxed)):
                for x in tensors:
                    _in_flight.works.setdefault(_memory(x), []).append(work)  # type: ignore[union-attr]
        return out


class _Reads(TorchFunctionMode):
    """Lets the host wait where it reads memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _READS:
            _in_flight.arrive()
        return func(*args, **(kwargs or {}))


@contextmanager
def running_ahead() -> Iterator[None]:
    """Let the host of this rank run ahead of its collectives in this thread. No thread may have a group of its own."""
    traits, collectives._GLOO = collectives._GLOO, collectives.CollectiveTraits()
    dist.Work.wait = _wait_on_the_stream  # type: ignore[method-assign]
    _in_flight.works = {}
    try:
        with _Operations(), _Reads():
            yield
            _in_flight.arrive()
    finally:
        _in_flight.works, collectives._GLOO = None, traits
        dist.Work.wait = _wait  # type: ignore[method-assign]


def host_waits() -> int:
    """Collectives for which the host of this thread has had to wait so far."""
    return _in_flight.waits
