"""Callback that verifies every checkpoint before it is published."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_megatron.arguments import checked
from lightning_megatron.checkpoint import SaveGuard
from lightning_megatron.errors import ConfigError, Problem
from lightning_megatron.lightning.strategy.megatron import MegatronStrategy


class VerifyCheckpoint(Callback):
    """Verifies every checkpoint that the Trainer saves, whichever callback asked for it.

    Before anything is written, ranks that hold the same parameters or optimizer state (over tp, dp, and the ends of a
    pipeline) compare their hashes. Then the written files are read again, compared with their hashes and checksums,
    and checked for completeness. Only after that the checkpoint gets its name and replaces the last one.

    A fault ends the run with a ``CheckpointError`` that names file and tensor. The previous checkpoint stays in place,
    and ``ckpt_path="last"`` and ``"best"`` still find what they found before.

    Args:
        replicas: True to compare values that several ranks hold.
        files: True to read the written files again.
    """

    @checked()
    def __init__(self, replicas: bool = True, files: bool = True) -> None:
        self.guard = SaveGuard(replicas, files)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Register the guard with the strategy, which calls it before it publishes a checkpoint."""
        if not isinstance(trainer.strategy, MegatronStrategy):
            reason = "verifies what MegatronStrategy writes: use that strategy, or leave it out"
            raise ConfigError([Problem("callbacks", type(self).__name__, reason)])
        trainer.strategy.save_guard = self.guard

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Unregister the guard."""
        if isinstance(trainer.strategy, MegatronStrategy):
            trainer.strategy.save_guard = None
