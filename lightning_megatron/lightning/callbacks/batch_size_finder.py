"""Lightning's search for the largest batch size, on several replicas."""

from __future__ import annotations

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder

from lightning_megatron.errors import ConfigError, Problem
from lightning_megatron.lightning.compat._private import training_data


class MegatronBatchSizeFinder(BatchSizeFinder):
    """Lightning's ``BatchSizeFinder`` for any number of replicas, which all take the size that every rank can train.

    The arguments are those of Lightning's callback, which takes one device. A trial ends on all ranks as soon as one of
    them is out of memory in a forward or a backward. Every rank must hold the whole model
    (``tp=pp=cp=ep=1``), and ``micro_batch_size`` must not be given.

    Example:
        >>> trainer = Trainer(strategy=MegatronStrategy(), devices=8, callbacks=[MegatronBatchSizeFinder("binsearch")])
        >>> trainer.fit(module)  # with the largest ``module.batch_size`` that fits
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str | None = None) -> None:
        """Check the run, as Lightning's callback does.

        Args:
            trainer: Trainer of the run.
            pl_module: the user's module.
            stage: stage of the run.

        Raises:
            ConfigError: on several replicas, outside of ``fit``, or if another batch size makes no other loaders.
        """
        if trainer.world_size == 1:
            super().setup(trainer, pl_module, stage)
        elif stage != "fit":
            raise ConfigError([Problem("callbacks", type(self).__name__, f"in {stage} it takes one device")])
        elif not isinstance(training_data(trainer), LightningModule | LightningDataModule):
            reason = "loaders given to fit keep their batch size: make them in the module or in a data module"
            raise ConfigError([Problem("callbacks", type(self).__name__, reason)])
