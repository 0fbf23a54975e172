"""The two ways to write the checkpoints of a run: at once, or on a thread while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from lightning_megatron import checkpoint
from lightning_megatron.mesh import ParallelMesh


class DirectWriter:
    """Checkpoints are written when they are saved, and removed once no link leads to them.

    Args:
        removals: checkpoints that still have to be removed.

    Attributes:
        removals: checkpoints that still have to be removed.
    """

    def __init__(self, removals: Sequence[Path] = ()) -> None:
        self.removals = removals

    def write(self, pending: checkpoint.PendingSave, mesh: ParallelMesh) -> Callable[[], None]:
        """Write a checkpoint; all ranks of the mesh call this.

        Returns:
            Function that waits until no memory of the run is read any more.

        Raises:
            CheckpointError: on every rank, if it has failed on any.
        """
        pending.write(mesh)
        return self.finish_copy

    def remove(self, path: Path) -> None:
        """Remove a checkpoint, now or once no link leads to it; one rank calls this."""
        self.removals = checkpoint.remove_unlinked([*self.removals, path.absolute()])

    def at_barrier(self, *, is_rank_zero: bool) -> None:
        """Remove what had to wait. ``ModelCheckpoint(save_last="link")`` changes its link right before a barrier."""
        if self.removals:
            self.removals = checkpoint.remove_unlinked(self.removals)

    def catch_up(self) -> None:
        """Finish, on the caller's thread, what a background writer has left to it."""

    def finish_copy(self) -> None:
        """Wait until no memory of the run is read any more."""

    def wait(self) -> None:
        """Wait until the last checkpoint is durable.

        Raises:
            CheckpointError: if writing it has failed.
        """

    def close(self) -> None:
        """Wait, and end the thread, if there is one."""


class AsyncWriter(DirectWriter):
    """Checkpoints are copied to host memory when they are saved or right afterwards, and written by a thread.

    Args:
        mesh: mesh of this rank; all ranks of it make a writer together.
        timeout: limit for the ranks' threads to answer one another.
        removals: checkpoints that still have to be removed.
    """

    def __init__(self, mesh: ParallelMesh, timeout: timedelta, removals: Sequence[Path] = ()) -> None:
        super().__init__(removals)
        self._background = checkpoint.BackgroundWriter(mesh, timeout)

    def write(self, pending: checkpoint.PendingSave, mesh: ParallelMesh) -> Callable[[], None]:
        """Copy a checkpoint to host memory, and begin to write the copy; all ranks of the mesh call this.

        Optimizer state that only steps write is copied by the thread.

        Returns:
            Function that waits until that is copied; it must be called before the next step writes it.

        Raises:
            CheckpointError: on every rank, if the previous checkpoint has failed, or the copy fails on any.
        """
        return self._background.begin(pending)

    def remove(self, path: Path) -> None:
        """Remove a checkpoint once a newer one is durable and no link leads to it."""
        self._background.remove(path)

    def at_barrier(self, *, is_rank_zero: bool) -> None:
        """Put back links that lead to a checkpoint which is not there yet, and remove what had to wait."""
        if is_rank_zero:
            self._background.keep_links()
        super().at_barrier(is_rank_zero=is_rank_zero)

    def catch_up(self) -> None:
        """Change links and remove checkpoints, as far as saves have become durable."""
        self._background.catch_up()

    def finish_copy(self) -> None:
        """Wait until optimizer state is copied."""
        self._background.finish_copy()

    def wait(self) -> None:
        """Wait until the checkpoint being written is durable."""
        self._background.wait()

    def close(self) -> None:
        """Wait, and end the thread."""
        self._background.close()
