"""The two ways to write the checkpoints of a run: at once, or on a thread while training goes on."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from lightning_megatron.checkpoint import BackgroundWriter, remove_unlinked
from lightning_megatron.mesh import ParallelMesh


class DirectWriter:
    """Checkpoints are written when they are saved, and removed once no link leads to them.

    Args:
        removals: checkpoints that still have to be removed.

    Attributes:
        thread: writer in the background; ``None`` where a save writes by itself.
        removals: checkpoints that still have to be removed.
    """

    thread: BackgroundWriter | None = None

    def __init__(self, removals: Sequence[Path] = ()) -> None:
        self.removals = removals

    def remove(self, path: Path) -> None:
        """Remove a checkpoint, now or once no link leads to it; one rank calls this."""
        self.removals = remove_unlinked([*self.removals, path.absolute()])

    def at_barrier(self, *, is_rank_zero: bool) -> None:
        """Remove what had to wait. ``ModelCheckpoint(save_last="link")`` changes its link right before a barrier."""
        self.removals = remove_unlinked(self.removals)

    def catch_up(self) -> None:
        """Finish, on the caller's thread, what a background writer has left to it."""

    def wait(self) -> None:
        """Wait until the last checkpoint is durable.

        Raises:
            CheckpointError: if writing it has failed.
        """

    def close(self) -> None:
        """Wait, and end the thread, if there is one."""


class AsyncWriter(DirectWriter):
    """Checkpoints are copied to host memory when they are saved, and written by a thread.

    Args:
        mesh: mesh of this rank; all ranks of it make a writer together.
        timeout: limit for the ranks' threads to answer one another.
        removals: checkpoints that still have to be removed.
    """

    thread: BackgroundWriter

    def __init__(self, mesh: ParallelMesh, timeout: timedelta, removals: Sequence[Path] = ()) -> None:
        super().__init__(removals)
        self.thread = BackgroundWriter(mesh, timeout)

    def remove(self, path: Path) -> None:
        """Remove a checkpoint once a newer one is durable and no link leads to it."""
        self.thread.remove(path)

    def at_barrier(self, *, is_rank_zero: bool) -> None:
        """Put back links that lead to a checkpoint which is not there yet, and remove what had to wait."""
        if is_rank_zero:
            self.thread.keep_links()
        super().at_barrier(is_rank_zero=is_rank_zero)

    def catch_up(self) -> None:
        """Change links and remove checkpoints, as far as saves have become durable."""
        self.thread.catch_up()

    def wait(self) -> None:
        """Wait until the checkpoint being written is durable."""
        self.thread.wait()

    def close(self) -> None:
        """Wait, and end the thread."""
        self.thread.close()
