"""The two ways to write the checkpoints of a run: at once, or on a thread while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from lightning_megatron import checkpoint
from lightning_megatron.mesh import ParallelMesh


class RunWriter:
    """Writes checkpoints when they are saved, or in the background; removes them once no link leads to them."""

    def __init__(self) -> None:
        self._removals: Sequence[Path] = ()
        self._background: checkpoint.BackgroundWriter | None = None

    def open_background(self, mesh: ParallelMesh, timeout: timedelta) -> None:
        """Write in the background until :meth:`close`; all ranks of the mesh call this."""
        self._background = checkpoint.BackgroundWriter(mesh, timeout)

    def write(self, pending: checkpoint.PendingSave, mesh: ParallelMesh) -> Callable[[], None]:
        """Write a checkpoint; all ranks of the mesh call this.

        For a write in the background it is first copied to host memory, except optimizer state that only steps change:
        the thread copies that.

        Returns:
            Function that waits until the memory of the run is no longer read; called before the next step changes it.

        Raises:
            CheckpointError: on every rank, if it or the one before has failed on any.
        """
        if self._background is not None:
            return self._background.begin(pending)
        pending.write(mesh)
        return self.finish_copy

    def remove(self, path: Path) -> None:
        """Remove a checkpoint once no link leads to it, and a newer one is durable; one rank calls this."""
        if self._background is not None:
            self._background.remove(path)
        else:
            self._removals = checkpoint.remove_unlinked([*self._removals, path.absolute()])

    def at_barrier(self, *, is_rank_zero: bool) -> None:
        """Restore links that lead to an unfinished checkpoint, and do removals that had to wait.

        ``ModelCheckpoint(save_last="link")`` changes its link right before a barrier.
        """
        if self._background is not None and is_rank_zero:
            self._background.keep_links()
        if self._removals:
            self._removals = checkpoint.remove_unlinked(self._removals)

    def catch_up(self) -> None:
        """Change links and remove checkpoints, on the caller's thread, as far as saves have become durable."""
        if self._background is not None:
            self._background.catch_up()

    def finish_copy(self) -> None:
        """Wait until the memory of the run is no longer read."""
        if self._background is not None:
            self._background.finish_copy()

    def wait(self) -> None:
        """Wait until the last checkpoint is durable.

        Raises:
            CheckpointError: if writing it has failed.
        """
        if self._background is not None:
            self._background.wait()

    def close(self) -> None:
        """Wait, and end the thread, if there is one."""
        background, self._background = self._background, None
        if background is not None:
            background.close()
