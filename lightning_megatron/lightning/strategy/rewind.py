"""A run that takes back what it has learned since a checkpoint, and goes on with the data that comes next."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_megatron.checkpoint import CheckpointError
from lightning_megatron.checkpoint.directory.newest import locate
from lightning_megatron.checkpoint.integrity.verify import size_faults
from lightning_megatron.lightning.checkpointing.trainer_state import load_trainer_checkpoint
from lightning_megatron.lightning.strategy.checkpoints import CheckpointStrategy


class RewindStrategy(CheckpointStrategy):
    """Parameters and optimizers that go back to a checkpoint of the run while steps, schedules and data go on."""

    _saved: dict[str, int] | None = None

    @property
    def saved_in_run(self) -> Mapping[str, int]:
        """Paths of the checkpoints that this run has written or has gone on from, with their steps."""
        return self._saved or {}

    def setup_environment(self) -> None:
        """Begin a run, which has no checkpoint yet."""
        self._saved = {}
        super().setup_environment()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint, and note where."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        self._note(filepath, checkpoint)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint, and note where it came from."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._note(checkpoint_path, checkpoint)
        return checkpoint

    def _note(self, path: Any, checkpoint: Mapping[str, Any]) -> None:
        if self._saved is not None and "optimizer_states" in checkpoint:
            self._saved[str(path)] = int(checkpoint["global_step"])

    def rewind(self, path: str) -> None:
        """Take parameters, buffers and optimizer state from a checkpoint; called by all ranks between two steps.

        Steps, samples, learning rates and their schedules, the loss scale and random numbers go on as they are: the
        samples since the checkpoint are not read again. Reading them again would lead to the very state that is left.

        Args:
            path: of a checkpoint with optimizer state.

        Raises:
            CheckpointError: if it cannot be loaded.
        """
        module = self.lightning_module
        assert module is not None
        self.finish_save()
        self.finish_param_gather()
        settings = [optimizer.group_settings() for optimizer in self.sharded_optimizers]
        checkpoint, _ = load_trainer_checkpoint(
            path,
            module,
            self.sharded_optimizers,
            self.mesh,
            sharded=self._distributed_optimizer,
            weights_only=None,
            check=self.load_check,
            finite=self._check_for_nan,
        )
        for optimizer, today in zip(self.sharded_optimizers, settings, strict=True):
            optimizer.load_group_settings(today)
        self._loaded_model = dict(checkpoint["state_dict"])
        module.on_load_checkpoint(checkpoint)
        self.load_model_state_dict(checkpoint, strict=module.strict_loading)


def is_usable(path: str) -> bool:
    """True if a checkpoint is there and all of its files are as long as they were written; one rank asks."""
    try:
        return not size_faults(Path(path), locate(Path(path)))
    except CheckpointError:
        return False
