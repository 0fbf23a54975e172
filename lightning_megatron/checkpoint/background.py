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
from lightning_megatron.checkpoint.publish import lead, link_end, links_in, remove_unlinked
from lightning_megatron.checkpoint.state import State
from lightning_megatron.checkpoint.together import CheckpointError, together
from lightning_megatron.comm.leaving import settle
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
        self._error: CheckpointError | None = None
        # Shared with the thread, under the lock: what changes the folder does so one at a time.
        self._lock = threading.Lock()
        self._is_durable = True
        self._removals: list[Path] = []
        self._relinks: list[Callable[[], None]] = []

    def begin(self, draft: Draft) -> None:
        """Copy what is to be saved to the host, and begin to write it; waits for the checkpoint before.

        Raises:
            CheckpointError: on every rank, if the checkpoint before has failed, or the copy does on any.
        """

        def copied() -> State:
            if self._mesh.rank == 0:
                draft.path.parent.mkdir(parents=True, exist_ok=True)  # somebody may make a link there at once
            return self._copy.of(draft.state, replicas)

        self.wait()
        replicas = draft.guard is not None and draft.guard.replicas
        state = together(self._mesh, draft.doing, copied)
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
        error, self._error, self._is_durable, self._relinks = self._error, None, True, []
        if error is not None:
            self._removals = []
            raise error
        self._remove_unlinked()

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint once the newer one is durable and no link leads to the older one. Call it on one rank.

        ``ModelCheckpoint`` removes the one before, and then leads its link to the new one.
        """
        with self._lock:
            self._removals.append(Path(os.path.abspath(path)))
            if self._is_durable:
                self._remove_unlinked()

    def keep_links(self) -> None:
        """Lead links to the checkpoint that is being written back to where they led; they follow once it is durable.

        Where it is durable already, what they led to before may go. Whoever makes a link to it at once
        (``save_last="link"``) must call this next, on rank 0.
        """
        with self._lock:
            if self._is_durable:
                self._remove_unlinked()
                return
            if self._path is None or self._path.exists():
                return
            for link, target in links_in(self._path.parent).items():
                if link_end(link, target) == self._path:
                    lead(link, self._links.get(link))
                    self._relinks.append(partial(lead, link, target))

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

    def _write(self, draft: Draft) -> None:
        """Life of the thread."""
        try:
            complete(draft, self._own_mesh)
            together(self._own_mesh, f"after {draft.doing}", self._catch_up)
            if self._own_mesh.host_group is not None:
                settle(self._own_mesh.host_group)
        except CheckpointError as error:
            self._error = error
        except Exception as error:  # a rank that is gone makes the group fail with errors of its own
            self._error = CheckpointError(f"{draft.doing}: {type(error).__name__}: {error}")

    def _catch_up(self) -> None:
        """What was put off."""
        with self._lock:
            self._is_durable = True
            for act in self._relinks:
                act()
            self._remove_unlinked()

    def _remove_unlinked(self) -> None:
        self._removals = remove_unlinked(self._removals)
