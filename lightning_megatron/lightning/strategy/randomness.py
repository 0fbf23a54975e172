"""Random numbers of a resumed run, which are those of the run without an interruption."""

from __future__ import annotations

from typing import Any

from lightning_megatron.lightning.run_state.random_state import random_state, restore_random_state
from lightning_megatron.mesh import ParallelMesh


class ResumedRandomness:
    """Generators of a rank, set again to a saved state where resuming itself has drawn from them."""

    def __init__(self) -> None:
        self._saved: dict[str, Any] | None = None
        self._validation: dict[str, Any] | None = None

    def load(self, saved: dict[str, Any] | None, mesh: ParallelMesh) -> None:
        """Continue with the state of a checkpoint; ``None`` for a checkpoint without one."""
        self._saved = saved
        if saved is not None:
            restore_random_state(saved, mesh.rng)

    def begin_batch(self, batch_idx: int, mesh: ParallelMesh) -> None:
        """Resume in mid-epoch with the random numbers of the uninterrupted run.

        A loader that begins draws a seed from torch's generator, which it would not have done in mid-epoch.
        """
        if self._saved is not None and batch_idx > 0:
            restore_random_state(self._saved, mesh.rng)
        self._saved = None

    def begin_validation(self, mesh: ParallelMesh) -> None:
        """Draw in a validation that starts again the random numbers that it drew before."""
        if self._saved is not None:
            restore_random_state(self._saved, mesh.rng)
        self._validation = random_state(mesh.rng)

    def end_validation(self, mesh: ParallelMesh, *, sanity_checking: bool) -> None:
        """Let the first batch after a validation that was started again continue from here."""
        self._validation = None
        if self._saved is not None and not sanity_checking:
            self._saved = random_state(mesh.rng)

    def rewind_validation(self, mesh: ParallelMesh) -> None:
        """Set every generator to its state at the start of the current validation, which a resumed run repeats."""
        if self._validation is not None:
            restore_random_state(self._validation, mesh.rng)
