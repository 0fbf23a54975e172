"""The thread that writes checkpoints while training goes on."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

from lightning_megatron.checkpoint.background.host_copy import HostCopy, StateCopy
from lightning_megatron.checkpoint.directory.atomic_dir import (
    discard,
    link_end,
    links_in,
    prepare,
    relink,
    remove,
    unlinked,
)
from lightning_megatron.checkpoint.saving import PendingSave
from lightning_megatron.comm.all_ranks import on_all_ranks
from lightning_megatron.comm.objects import drain_group
from lightning_megatron.errors import CheckpointError
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.recorder.file_format import Kind

_log = logging.getLogger(__name__)
T = TypeVar("T")


class BackgroundWriter:
    """Writes one checkpoint at a time on a thread, which communicates with those of other ranks over its own group.

    It is a thread and not a process because Gaudi's runtime does not survive a fork. Every rank has a writer, and all
    ranks call :meth:`begin`, :meth:`wait` and :meth:`close` in the same order. Removals and changes of links wait until
    the checkpoint is durable, and are dropped if the save fails: the older checkpoint then stays as it is.

    The thread writes the checkpoint and gives it its name. Links are changed by the caller's thread alone
    (:meth:`catch_up`), because code that makes a link there reads the folder first.

    Args:
        mesh: ranks that save together; all of them must construct a writer, because this creates the group.
        timeout: timeout of the group: a rank that waits longer for the others fails.
    """

    def __init__(self, mesh: ParallelMesh, timeout: timedelta | None = None) -> None:
        self._mesh, self._own_mesh = mesh, mesh.with_new_host_group(timeout)
        self._memory = HostCopy()
        self._copy: StateCopy | None = None
        self._thread: threading.Thread | None = None
        self._pending: PendingSave | None = None
        self._links: dict[Path, str] = {}
        self._error: CheckpointError | None = None
        self._is_durable = threading.Event()  # set by the thread on all ranks
        self._removals: list[Path] = []
        self._relinks: list[Callable[[], None]] = []
        self._remover: threading.Thread | None = None

    def begin(self, pending: PendingSave) -> Callable[[], None]:
        """Wait for the previous checkpoint, copy this one to the host and begin to write it.

        Fragments in ``pending.late`` are not copied here: the thread copies them first.

        Returns:
            Function that waits until those are copied, too; call it before you write into them.

        Raises:
            CheckpointError: on every rank, if the previous checkpoint has failed, or the copy fails on any.
        """

        def copied() -> StateCopy:
            if self._mesh.rank == 0:
                prepare(pending.path, pending.temporary)  # a link that leads here is then known to be incomplete
            return self._memory.begin(pending.state, pending.late, replicas)

        self.wait()
        replicas = pending.guard is not None and pending.guard.replicas
        self._copy = begun = _or_discarded(self._mesh, pending, copied)
        self._pending = pending
        self._links = links_in(pending.path.parent) if self._mesh.rank == 0 else {}
        self._is_durable.clear()
        self._thread = threading.Thread(target=self._write, args=(pending, begun), name=pending.action)
        self._thread.start()
        return begun.wait

    def finish_copy(self) -> None:
        """Wait until the caller's memory is no longer read. The checkpoint may not be on the disk yet."""
        if self._copy is not None:
            self._copy.wait()

    def wait(self) -> None:
        """Wait until the checkpoint that is being written, if there is one, is durable.

        Raises:
            CheckpointError: on every rank, if it has failed on any.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = self._pending = self._copy = None
        error, self._error = self._error, None
        self._join_remover()
        if error is not None:
            self._relinks, self._removals = [], []
            raise error
        self._follow()

    def catch_up(self) -> None:
        """Run the delayed removals and relinks once the checkpoint is durable. Cheap; may be called at any time."""
        if self._pending is not None and self._is_durable.is_set():
            self._pending = None
            self._follow()

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint once the newer one is durable and no link leads to the older one. Call it on one rank.

        ``ModelCheckpoint`` removes the older checkpoint first, and points its link to the new one afterwards.
        """
        self._removals.append(Path(os.path.abspath(path)))
        if self._pending is None:
            self._remove_unlinked()

    def keep_links(self) -> None:
        """Point links that lead to the unfinished checkpoint back to their old targets until it is durable.

        If it is durable already, the old targets may be removed. Code that makes a link to the checkpoint at once
        (``save_last="link"``) must call this next, on rank 0.
        """
        self.catch_up()
        path = None if self._pending is None else Path(os.path.abspath(self._pending.path))
        if path is None or path.exists():
            self._remove_unlinked()
            return
        for link, target in links_in(path.parent).items():
            if link_end(link, target) == path:
                relink(link, self._links.get(link))
                self._relinks.append(partial(relink, link, target))

    def close(self) -> None:
        """Wait, and free the group and the memory.

        Raises:
            CheckpointError: as :meth:`wait`.
        """
        try:
            self.wait()
        finally:
            self._join_remover()
            self._memory = HostCopy()
            self._own_mesh.destroy_host_group()

    def _write(self, pending: PendingSave, begun: StateCopy) -> None:
        """Body of the writer thread."""
        try:
            with self._own_mesh.host.during(Kind.WRITE, str(pending.path)):
                state = _or_discarded(self._own_mesh, pending, begun.finish)
                replace(pending, state=state).write(self._own_mesh)
            if self._own_mesh.host_group is not None:
                drain_group(self._own_mesh.host_group)
            self._is_durable.set()
        except CheckpointError as error:
            self._error = error
        except Exception as error:  # a rank that is gone makes the group fail with errors of its own
            self._error = CheckpointError(f"{pending.action}: {type(error).__name__}: {error}")
            self._error.__cause__ = error
        finally:
            begun.release()

    def _follow(self) -> None:
        """Point links to the checkpoint that is durable now, and remove their old targets."""
        relinks, self._relinks = self._relinks, []
        for act in relinks:
            act()
        self._remove_unlinked()

    def _remove_unlinked(self) -> None:
        """Remove unlinked checkpoints on a thread, so that no training step waits for the disk."""
        free, self._removals = unlinked(self._removals)
        if free:
            self._join_remover()
            self._remover = threading.Thread(target=_remove_all, args=(free,), name="removing checkpoints")
            self._remover.start()

    def _join_remover(self) -> None:
        if self._remover is not None:
            self._remover.join()
            self._remover = None


def _or_discarded(mesh: ParallelMesh, pending: PendingSave, step: Callable[[], T]) -> T:
    """Result of a step of a save on all ranks; if it fails, what the save has written is deleted."""
    try:
        return on_all_ranks(mesh, pending.action, step)
    except CheckpointError:
        if mesh.rank == 0:
            discard(pending.temporary)
        raise


def _remove_all(paths: list[Path]) -> None:
    for path in paths:
        try:
            remove(path)
        except OSError as error:  # the checkpoint either lost its name or is still complete: training can go on
            _log.warning("%s could not be removed: %s", path, error)
