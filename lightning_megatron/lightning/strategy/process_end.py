"""Exit of a process on devices whose software waits for the other ranks at exit.

Gaudi's bridge destroys the process groups when Python ends. Each group waits on the store, without a timeout, until
all of its members destroy it. Without this module a failed rank would wait there for ranks that wait for it in a
collective: no process would end, and no launcher would see an exit status.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public, but no stub says so

from lightning_megatron.comm.objects import drain_group
from lightning_megatron.comm.rendezvous import Store, comes_true
from lightning_megatron.lightning.compat._private import default_store

_log = logging.getLogger(__name__)

GRACE = 5.0
"""Seconds that a failed rank gives the others to log what they saw, before its exit makes a launcher end them."""
_FAILED, _FINE = "failed", "all ranks are here"


class ProcessEnd:
    """Ends this process together with the other ranks of its job, or at once if one of them has failed.

    It is an ``atexit`` hook, so a script has handled its errors before. Python runs such hooks in reverse order:
    :meth:`register` is called once a group exists, when the bridge has registered its own hook.

    Attributes:
        has_failed: True if the last run of this process has ended in an error.
    """

    def __init__(self) -> None:
        self.has_failed = False
        self._groups: list[weakref.ref[dist.ProcessGroup]] = []
        self._host: weakref.ref[dist.ProcessGroup] | None = None
        self._is_registered = False

    def register(self) -> None:
        """Register the exit hook, once; the default process group must exist."""
        if not self._is_registered:
            self._is_registered = True
            atexit.register(self._end)

    def own(self, groups: Iterable[dist.ProcessGroup], host: dist.ProcessGroup | None) -> None:
        """Note the groups that this package has created, in this order, and ``host``, which was created last."""
        self._groups = [weakref.ref(group) for group in groups]
        self._host = None if host is None else weakref.ref(host)

    def note_error(self, error: BaseException, together: bool) -> None:
        """Note the error that has ended a run; a ``SystemExit`` that all ranks raise together counts as none."""
        self.has_failed = self.has_failed or not (together and isinstance(error, SystemExit))

    def _end(self) -> None:
        if not dist.is_initialized():
            return  # destroyed by the script, or by a later strategy of this process
        # Python sets `last_type` when it prints an uncaught error: code after `fit` may fail, too.
        failed = self.has_failed or getattr(sys, "last_type", None) is not None
        try:
            rank, ranks, store = dist.get_rank(), dist.get_world_size(), default_store()
            store = PrefixStore("lightning_megatron/process end", store)
            if _all_are_well(store, ranks, failed):
                self._destroy_groups()
                _part(store, rank, ranks)
                return
            reason = "it has failed" if failed else "another rank has failed"
        except BaseException as error:  # Ctrl-C included; the store is gone with rank 0's process
            reason = f"it has lost the others: {type(error).__name__}: {error}"
        end_now(reason)

    def _destroy_groups(self) -> None:
        """Destroy the groups of this package, the last one first, then the default group and all others with it."""
        host = None if self._host is None else self._host()
        if host is not None and host is not dist.group.WORLD:
            drain_group(host)
            dist.destroy_process_group(host)
        for reference in reversed(self._groups):
            group = reference()
            if group is not None and group is not dist.group.WORLD:
                with suppress(ValueError):  # destroyed by the script
                    dist.destroy_process_group(group)
        dist.destroy_process_group()


def _all_are_well(store: Store, ranks: int, failed: bool) -> bool:
    """Wait until all ranks exit; False as soon as one, perhaps this one (``failed``), has failed."""
    if failed:
        store.set("over", _FAILED)
    come = store.add("come", 1)
    if failed:
        end = time.monotonic() + GRACE
        while come < ranks and time.monotonic() < end:
            time.sleep(0.1)
            come = store.add("come", 0)
        return False
    if come == ranks and not store.check(["over"]):
        store.set("over", _FINE)
    pause = 0.02
    while not store.check(["over"]):
        time.sleep(pause)
        pause = min(2 * pause, 1.0)
    return store.get("over").decode() == _FINE


def _part(store: Store, rank: int, ranks: int) -> None:
    """Let rank 0, whose process may host the store, leave last."""
    store.add("left", 1)
    if rank == 0:
        comes_true(lambda: store.add("left", 0) >= ranks, time.monotonic() + GRACE)


def end_now(reason: str) -> None:
    """End this process with status 1, without the exit hooks of Python and of libraries."""
    _log.error("this process ends at once, since %s", reason)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(1)
