"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist

from lightning_megatron.checkpoint.all_ranks import on_all_ranks
from lightning_megatron.checkpoint.directory.atomic_dir import (
    discard,
    lead,
    link_end,
    links_in,
    prepare,
    remove,
    unlinked,
)
from lightning_megatron.checkpoint.host_copy import HostCopy
from lightning_megatron.checkpoint.save import Draft, complete
from lightning_megatron.checkpoint.state_dict import State
from lightning_megatron.comm.objects import drain_group
from lightning_megatron.errors import CheckpointError
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.recorder.file_format import Kind

_log = logging.getLogger(__name__)


class BackgroundWriter:
    """Writes one checkpoint at a time on a thread, which talks to the threads of other ranks over a group of its own.

    A thread and no process: Gaudi's runtime does not survive a fork. Every rank has a writer, and all call
    :meth:`begin`, :meth:`wait` and :meth:`close` in the same order. What else is to happen to the folder of the
    checkpoint waits until that is durable, and is forgotten if it fails: the checkpoint before stays as it is.

    The thread writes and gives the checkpoint its name. Links are changed by the caller's thread alone
    (:meth:`catch_up`), because whoever makes one there looks at what is there first.

    Args:
        mesh: who takes part; the group is made here, so all ranks must do this.
        timeout: after which a rank that nobody answers fails.
    """

    def __init__(self, mesh: ParallelMesh, timeout: timedelta | None = None) -> None:
        self._mesh, self._own_mesh = mesh, mesh.with_new_host_group(timeout)
        self._copy = HostCopy()
        self._thread: threading.Thread | None = None
        self._draft: Draft | None = None
        self._links: dict[Path, str] = {}
        self._error: CheckpointError | None = None
        self._is_durable = threading.Event()  # set by the thread on all ranks
        self._removals: list[Path] = []
        self._relinks: list[Callable[[], None]] = []
        self._remover: threading.Thread | None = None

    def begin(self, draft: Draft) -> None:
        """Copy what is to be saved to the host, and begin to write it; waits for the checkpoint before.

        Raises:
            CheckpointError: on every rank, if the checkpoint before has failed, or the copy does on any.
        """

        def copied() -> State:
            if self._mesh.rank == 0:
                prepare(draft.path, draft.temporary)  # whoever finds a link to it knows that it was never complete
            return self._copy.of(draft.state, replicas)

        self.wait()
        replicas = draft.guard is not None and draft.guard.replicas
        try:
            state = on_all_ranks(self._mesh, draft.doing, copied)
        except CheckpointError:
            if self._mesh.rank == 0:
                discard(draft.temporary)
            raise
        self._draft = draft
        self._links = links_in(draft.path.parent) if self._mesh.rank == 0 else {}
        self._is_durable.clear()
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
        self._thread = self._draft = None
        error, self._error = self._error, None
        self._join_remover()
        if error is not None:
            self._relinks, self._removals = [], []
            raise error
        self._follow()

    def catch_up(self) -> None:
        """Do what was put off, once the checkpoint is durable; costs nothing before, and can be called at any time."""
        if self._draft is not None and self._is_durable.is_set():
            self._draft = None
            self._follow()

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint once the newer one is durable and no link leads to the older one. Call it on one rank.

        ``ModelCheckpoint`` removes the one before, and then leads its link to the new one.
        """
        self._removals.append(Path(os.path.abspath(path)))
        if self._draft is None:
            self._remove_unlinked()

    def keep_links(self) -> None:
        """Lead links to the checkpoint that is being written back to where they led; they follow once it is durable.

        Where it is durable already, what they led to before may go. Whoever makes a link to it at once
        (``save_last="link"``) must call this next, on rank 0.
        """
        self.catch_up()
        path = None if self._draft is None else Path(os.path.abspath(self._draft.path))
        if path is None or path.exists():
            self._remove_unlinked()
            return
        for link, target in links_in(path.parent).items():
            if link_end(link, target) == path:
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
            self._join_remover()
            self._copy = HostCopy()
            if self._mesh.is_distributed:
                dist.destroy_process_group(self._own_mesh.host_group)

    def _write(self, draft: Draft) -> None:
        """Life of the thread."""
        try:
            with self._own_mesh.host.during(Kind.WRITE, str(draft.path)):
                complete(draft, self._own_mesh)
            if self._own_mesh.host_group is not None:
                drain_group(self._own_mesh.host_group)
            self._is_durable.set()
        except CheckpointError as error:
            self._error = error
        except Exception as error:  # a rank that is gone makes the group fail with errors of its own
            self._error = CheckpointError(f"{draft.doing}: {type(error).__name__}: {error}")
            self._error.__cause__ = error

    def _follow(self) -> None:
        """Lead links to what is durable now, and remove what they led to."""
        relinks, self._relinks = self._relinks, []
        for act in relinks:
            act()
        self._remove_unlinked()

    def _remove_unlinked(self) -> None:
        """Let a thread do it: no step waits for the disk."""
        free, self._removals = unlinked(self._removals)
        if free:
            self._join_remover()
            self._remover = threading.Thread(target=_remove_all, args=(free,), name="removing checkpoints")
            self._remover.start()

    def _join_remover(self) -> None:
        if self._remover is not None:
            self._remover.join()
            self._remover = None


def _remove_all(paths: list[Path]) -> None:
    for path in paths:
        try:
            remove(path)
        except OSError as error:  # it has lost its name, or still has it and is whole: nothing that training depends on
            _log.warning("%s could not be removed: %s", path, error)
