"""No checkpoint gets its name before it has been looked at."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_megatron.arguments import checked
from lightning_megatron.checkpoint import SaveGuard
from lightning_megatron.errors import ConfigError, Problem
from lightning_megatron.lightning.strategy.megatron import MegatronStrategy


class VerifyCheckpoint(Callback):
    """Verifies every checkpoint that the Trainer saves, by whichever callback.

    Before anything is written, the values of parameters and of optimizer state that several ranks hold (over tp, dp,
    and the ends of a pipeline) are compared between them, by hashes. What was written is read again and compared with
    its hashes and check sums, and looked at for completeness. Only then it gets its name and replaces the last one.

    A fault ends the run with a ``CheckpointError`` that names file and tensor; the checkpoint before stays where it is,
    and so does what ``ckpt_path="last"`` and ``"best"`` find on the disk.

    Args:
        replicas: compare what several ranks hold.
        files: read again what was written.
    """

    @checked()
    def __init__(self, replicas: bool = True, files: bool = True) -> None:
        self.guard = SaveGuard(replicas, files)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Hand the check to the strategy, which asks it before a checkpoint gets its name."""
        if not isinstance(trainer.strategy, MegatronStrategy):
            reason = "verifies what MegatronStrategy writes: use that strategy, or leave it out"
            raise ConfigError([Problem("callbacks", type(self).__name__, reason)])
        trainer.strategy.save_guard = self.guard

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take it back."""
        if isinstance(trainer.strategy, MegatronStrategy):
            trainer.strategy.save_guard = None
