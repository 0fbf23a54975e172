"""The checkpoint folders of a run: locked against other runs, and searched for the newest good checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_megatron import checkpoint
from lightning_megatron.errors import CheckpointError
from lightning_megatron.lightning.checkpointing.run_folders import RunFolders, asks_for_last, nothing_good, patience
from lightning_megatron.lightning.run_state.last_checkpoint import NAMED, warn_of_new_folder
from lightning_megatron.lightning.strategy.ranks import JobRanks

T = TypeVar("T")


class SaveFolders:
    """Checkpoint folders: rank 0 inspects them, and all ranks act on the result.

    Attributes:
        goes_on_from_last: True from the start of a fit with ``ckpt_path="last"`` until its checkpoint is chosen.
        restores: True if the latest fit loads a checkpoint, as far as it is known before the model is built.
    """

    def __init__(self, ranks: JobRanks) -> None:
        self._ranks = ranks
        self._held: RunFolders | None = None
        self._found_none = False
        self._went_on_from: checkpoint.Progress | None = None
        self._generation: int | None = None
        self.goes_on_from_last = self.restores = False

    def begin_fit(self, trainer: Trainer, ckpt_path: Any) -> bool:
        """Reset for a new fit; True if it asks for the last checkpoint."""
        self.release()
        self._went_on_from = self._generation = None
        self._found_none = False
        self.goes_on_from_last = asks_for_last(trainer, ckpt_path)
        self.restores = bool(ckpt_path) and str(ckpt_path).partition(":")[0] not in NAMED
        return self.goes_on_from_last

    def find_last(self, trainer: Trainer, ckpt_path: Any) -> Any:
        """Look for the last checkpoint before Lightning does; called by all ranks.

        Lightning chooses by names and times of files, each rank for itself, and starts from scratch if it finds none.

        Returns:
            The path to resume from; ``ckpt_path`` if there is none, or ``None`` if this run has warned about that.

        Raises:
            CheckpointError: if there are checkpoints but none is good, or if another run saves there.
        """

        def look() -> str | None:
            self._held = RunFolders(trainer)
            if not self._held.found() and not self._held.are_held():
                return None  # create no folder: loggers and callbacks check if it exists
            self._held.hold(patience(self._ranks.timeout, True))
            found = self._held.last()
            return None if found is None else str(found)

        found = self._on_rank_0(look)
        self.goes_on_from_last = self.restores = found is not None
        self._found_none = found is None
        if found is None and ckpt_path == "last" and self._on_rank_0(lambda: warn_of_new_folder(trainer)):
            return None  # Lightning would warn, too, and advise what the user has done already
        return ckpt_path if found is None else found

    def hold(self, trainer: Trainer) -> None:
        """Lock the folders that this run saves in against other runs, until it ends; called by all ranks.

        Raises:
            CheckpointError: if another run saves there, or has saved there after this one looked for the last
                checkpoint and found none.
        """

        def hold() -> None:
            self._held = self._held or RunFolders(trainer)
            self._held.hold(patience(self._ranks.timeout, False))
            if self._found_none and (found := self._held.last()) is not None:
                text = "has been saved since this run looked for the last checkpoint, by another run: restart this one"
                raise CheckpointError(f"{found} {text}")

        self._on_rank_0(hold)

    def release(self) -> None:
        """Unlock the folders."""
        folders, self._held = self._held, None
        if folders is not None:
            folders.release()

    def lost(self) -> str:
        """Reason why the folders are no longer locked; empty if they are, and on ranks other than 0."""
        return self._held.lost() if self._held else ""

    def newest_good(self, check: checkpoint.Check) -> str:
        """The newest good checkpoint, with a warning if it is not the newest; called by all ranks.

        Raises:
            CheckpointError: if there is none; it lists what is wrong with each.
        """
        self.goes_on_from_last = False
        found = self._on_rank_0(lambda: [] if self._held is None else self._held.found())
        while True:
            best, passed = checkpoint.newest_good(found)
            if best is None:
                raise CheckpointError(nothing_good(found))
            if not (reason := self._damage(best, check)):
                break
            found[found.index(best)] = checkpoint.Candidate(best.path, best.progress, "damaged", reason)
        if passed:
            reasons = "".join(f"\n  - {one.path}: {one.reason}" for one in passed)
            rank_zero_warn(f"resuming from the newest good checkpoint, {best.path}; passed over:{reasons}")
        return str(best.path)

    def _damage(self, candidate: checkpoint.Candidate, check: checkpoint.Check) -> str:
        try:
            faults = checkpoint.faults_of(candidate.path, self._ranks.mesh, check)
        except CheckpointError as error:  # a file can no longer be read
            return str(error)
        return str(faults[0]) if faults else ""

    def went_on(self, progress: checkpoint.Progress) -> None:
        """Note the progress of the checkpoint that this run resumes from."""
        self._went_on_from, self._generation = progress, None

    def next_progress(self, step: int) -> checkpoint.Progress | None:
        """Generation and step of the next save, which order the checkpoints of a folder; only on rank 0."""
        if self._generation is None and self._held is not None:
            self._generation = self._held.next_progress(self._went_on_from, step).generation
        return None if self._generation is None else checkpoint.Progress(self._generation, step)

    def _on_rank_0(self, step: Callable[[], T]) -> T:
        outcome: tuple[T | None, CheckpointError | None] = None, None
        if self._ranks.strategy.is_global_zero:
            try:
                outcome = step(), None
            except CheckpointError as fault:
                outcome = None, fault
            except Exception as fault:  # the others wait for an answer
                outcome = None, CheckpointError(f"{type(fault).__name__}: {fault}")
        result, error = self._ranks.broadcast(outcome)
        if error is not None:
            raise error
        return result
