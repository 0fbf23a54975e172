"""A strategy whose runs have their folders to themselves, and go on from the newest good checkpoint there."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_megatron.checkpoint import Candidate, Check, CheckpointError, Progress, faults_of, newest_good
from lightning_megatron.checkpoint.directory.newest import is_checkpoint
from lightning_megatron.checkpoint.integrity.manifest import read_manifest
from lightning_megatron.lightning.checkpointing.run_folders import RunFolders, asks_for_last, nothing_good, patience
from lightning_megatron.lightning.strategy.mesh import MeshStrategy

T = TypeVar("T")


class FolderStrategy(MeshStrategy):
    """Rank 0 looks into the folders of checkpoints, and all ranks do what it finds."""

    _folders: RunFolders | None = None
    _goes_on_from_last: bool = False
    _found_none: bool = False
    _went_on_from: Progress | None = None
    _generation: int | None = None

    @abstractmethod
    def _start_ranks(self) -> None:
        """Start the process groups, if they are not there."""

    def _begin_fit(self, trainer: Trainer, ckpt_path: Any) -> Any:
        """Look for the last checkpoint where one is asked for, before Lightning does; called by all ranks.

        Lightning goes by names and times of files, each rank for itself, and begins anew where there is no such file.

        Returns:
            The path to go on from, or what was given.

        Raises:
            CheckpointError: where there are checkpoints and none is good, or another run saves there.
        """
        self._leave_folders()
        self._went_on_from = self._generation = None
        self._found_none = False
        self._goes_on_from_last = asks_for_last(trainer, ckpt_path)
        if not self._goes_on_from_last:
            return ckpt_path
        assert self.lightning_module is not None
        self.lightning_module.trainer = trainer  # Lightning's next step
        self._start_ranks()

        def look() -> str | None:
            self._folders = RunFolders(trainer)
            if not self._folders.found() and not self._folders.are_held():
                return None  # nor is a folder made: loggers and callbacks look if it is there
            self._folders.hold(patience(self._timeout, True))
            found = self._folders.last()
            return None if found is None else str(found)

        found = self._on_rank_0(look)
        self._goes_on_from_last, self._found_none = found is not None, found is None
        return ckpt_path if found is None else found

    def _hold_folders(self, trainer: Trainer) -> None:
        """Keep other runs out of the folders that this one saves in, until it ends; called by all ranks.

        Raises:
            CheckpointError: if another one saves there, or has saved there where this one was to go on from the last
                checkpoint, and found none.
        """

        def hold() -> None:
            self._folders = self._folders or RunFolders(trainer)
            self._folders.hold(patience(self._timeout, False))
            if self._found_none and (found := self._folders.last()) is not None:
                text = "has been saved since this run looked for the last checkpoint, by another one: start it again"
                raise CheckpointError(f"{found} {text}")

        self._on_rank_0(hold)

    def _leave_folders(self) -> None:
        """Let other runs have them."""
        folders, self._folders = self._folders, None
        if folders is not None:
            folders.release()

    def _newest_good(self, check: Check) -> str:
        """The newest good checkpoint of the folders, which one warning says if it is not the newest; all ranks call it.

        Args:
            check: the extent to which files are held against what was written.

        Raises:
            CheckpointError: if there is none; it lists what is wrong with each.
        """
        self._goes_on_from_last = False
        found = self._on_rank_0(lambda: [] if self._folders is None else self._folders.found())
        while True:
            best, passed = newest_good(found)
            if best is None:
                raise CheckpointError(nothing_good(found))
            if not (reason := self._damage(best, check)):
                break
            found[found.index(best)] = Candidate(best.path, best.progress, "damaged", reason)
        if passed:
            reasons = "".join(f"\n  - {one.path}: {one.reason}" for one in passed)
            rank_zero_warn(f"resuming from the newest good checkpoint, {best.path}; passed over:{reasons}")
        return str(best.path)

    def _damage(self, candidate: Candidate, check: Check) -> str:
        try:
            faults = faults_of(candidate.path, self.mesh, check)
        except CheckpointError as error:  # a file can no longer be read
            return str(error)
        return str(faults[0]) if faults else ""

    def _went_on(self, path: str, step: int) -> None:
        """Note what this run goes on from; rank 0 alone needs it."""
        if self.is_global_zero and self._folders is not None:
            progress = read_manifest(Path(path)).progress if is_checkpoint(path) else None
            self._went_on_from, self._generation = progress or Progress(0, step), None

    def _next_progress(self, step: int) -> Progress | None:
        """Place of a save among those of its folder; rank 0 alone asks."""
        if self._generation is None and self._folders is not None:
            self._generation = self._folders.next_progress(self._went_on_from, step).generation
        return None if self._generation is None else Progress(self._generation, step)

    def _on_rank_0(self, step: Callable[[], T]) -> T:
        outcome: tuple[T | None, CheckpointError | None] = None, None
        if self.is_global_zero:
            try:
                outcome = step(), None
            except CheckpointError as fault:
                outcome = None, fault
            except Exception as fault:  # the others wait for an answer
                outcome = None, CheckpointError(f"{type(fault).__name__}: {fault}")
        result, error = self.broadcast(outcome)
        if error is not None:
            raise error
        return result
