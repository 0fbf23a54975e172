"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist

from lightning_megatron.checkpoint.draft import Draft, complete
from lightning_megatron.checkpoint.host_copy import HostCopy
from lightning_megatron.checkpoint.publish import lead, links_in, remove
from lightning_megatron.checkpoint.together import CheckpointError, together
from lightning_megatron.mesh import ParallelMesh


class BackgroundWriter:
    """Writes one checkpoint at a time on a thread, which talks to the threads of other ranks over a group of its own.

    A thread and no process: Gaudi's runtime does not survive a fork. Every rank has a writer, and all call
    :meth:`begin`, :meth:`wait` and :meth:`close` in the same order. What else is to happen to the folder of the
    checkpoint waits until that is durable, and is forgotten if it fails: the checkpoint before stays as it is.

    Args:
        mesh: who takes part; the group is made here, so all ranks must do this.
        timeout: after which a rank that nobody answers fails.
    """

    def __init__(self, mesh: ParallelMesh, timeout: timedelta | None = None) -> None:
        self._mesh, self._own_mesh = mesh, mesh.beside(timeout)
        self._copy = HostCopy()
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        self._links: dict[Path, str] = {}
        # Shared with the thread.
        self._lock = threading.Lock()
        self._then: list[Callable[[], None]] = []
        self._is_durable = True
        self._error: CheckpointError | None = None

    def begin(self, draft: Draft) -> None:
        """Copy what is to be saved to the host, and begin to write it; waits for the checkpoint before.

        Raises:
            CheckpointError: on every rank, if the checkpoint before has failed, or the copy does on any.
        """
        self.wait()
        replicas = draft.guard is not None and draft.guard.replicas
        state = together(self._mesh, draft.doing, lambda: self._copy.of(draft.state, replicas))
        self._path = Path(os.path.abspath(draft.path))
        self._links = links_in(self._path.parent) if self._mesh.rank == 0 else {}
        self._is_durable = False
        self._thread = threading.Thread(target=self._write, args=(replace(draft, state=state),), name=draft.doing)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the checkpoint that is being written, if any, is durable.

        Raises:
            CheckpointError: on every rank, if it has failed on any.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        with self._lock:
            error, self._error, self._is_durable = self._error, None, True
            self._then.clear()
        if error is not None:
            raise error

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint once the one that is being written is durable. Call it on one rank."""
        self._afterwards(partial(remove, path))

    def keep_links(self) -> None:
        """Lead links to the checkpoint that is being written back to where they led; they follow once it is durable.

        Whoever makes a link to it at once (``save_last="link"``) must call this next, on rank 0.
        """
        path = self._path
        if self._thread is None or path is None or path.exists():
            return
        for link, target in links_in(path.parent).items():
            if Path(os.path.abspath(link.parent / target)) == path:
                lead(link, self._links.get(link))
                self._afterwards(partial(lead, link, target))

    def close(self) -> None:
        """Wait, and let go of the group and of the memory.

        Raises:
            CheckpointError: as :meth:`wait`.
        """
        try:
            self.wait()
        finally:
            self._copy = HostCopy()
            if self._mesh.is_distributed:
                dist.destroy_process_group(self._own_mesh.host_group)

    def _afterwards(self, act: Callable[[], None]) -> None:
        with self._lock:
            if not self._is_durable:
                self._then.append(act)
                return
        act()

    def _write(self, draft: Draft) -> None:
        """Life of the thread."""
        try:
            complete(draft, self._own_mesh)
            together(self._own_mesh, f"after {draft.doing}", self._act)
        except Exception as error:
            # A rank that is gone makes the group fail with errors of its own.
            known = isinstance(error, CheckpointError)
            self._error = error if known else CheckpointError(f"{draft.doing}: {type(error).__name__}: {error}")  # type: ignore[assignment]

    def _act(self) -> None:
        """What was put off; from when there is nothing left on, nothing is put off."""
        while True:
            with self._lock:
                if not self._then:
                    self._is_durable = True
                    return
                act = self._then.pop(0)
            act()
