"""Callback that uploads a run's checkpoints to the service that gets its metrics."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger
from lightning.pytorch.trainer.states import TrainerFn

from lightning_megatron.arguments import checked
from lightning_megatron.errors import ConfigError, Problem


class UploadCheckpoints(Callback):
    """Uploads checkpoints to MLflow or Weights & Biases when ``fit`` has ended.

    ``MLFlowLogger(log_model=True)`` and ``WandbLogger(log_model=True)`` look for single files, and would upload nothing
    of a checkpoint that is a directory. This callback uploads those that ``ModelCheckpoint`` has kept: the best ones
    and the last. Rank 0 uploads; it must see the files of all ranks. A run that ends by an error or a signal does not.

    Args:
        best: True to upload the checkpoints that ``save_top_k`` has kept.
        last: True to upload the last checkpoint.
    """

    @checked()
    def __init__(self, best: bool = True, last: bool = True) -> None:
        self.best, self.last = best, last

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a fit without a logger to upload to.

        Raises:
            ConfigError: without ``MLFlowLogger`` or ``WandbLogger``.
        """
        if stage == TrainerFn.FITTING and not any(isinstance(x, MLFlowLogger | WandbLogger) for x in trainer.loggers):
            names = ", ".join(type(logger).__name__ for logger in trainer.loggers) or None
            reason = "UploadCheckpoints has no logger to upload to: add one of these, or leave it out"
            raise ConfigError([Problem("logger", names, reason, ("MLFlowLogger", "WandbLogger"))])

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Upload, before Lightning closes the loggers."""
        if stage != TrainerFn.FITTING or not trainer.is_global_zero:
            return
        for path, is_best in self._kept(trainer):
            for logger in trainer.loggers:
                upload(logger, path, is_best)

    def _kept(self, trainer: Trainer) -> Iterator[tuple[Path, bool]]:
        """Path of each checkpoint directory, once, and True for the best one."""
        seen = set()
        for saver in trainer.checkpoint_callbacks:
            if not isinstance(saver, ModelCheckpoint):
                continue
            paths = [*saver.best_k_models, saver.best_model_path] if self.best else []
            paths += [saver.last_model_path] if self.last else []
            for path in (Path(name) for name in paths if name):
                if path.is_dir() and path.resolve() not in seen:
                    seen.add(path.resolve())
                    yield path, str(path) == saver.best_model_path


def upload(logger: Logger, path: Path, is_best: bool) -> None:
    """Upload a checkpoint directory, or the one that a link points to, with the logger's own client."""
    if isinstance(logger, MLFlowLogger):
        client: Any = logger.experiment
        client.log_artifacts(logger.run_id, str(path.resolve()), f"model/checkpoints/{path.stem}")
    elif isinstance(logger, WandbLogger):
        import wandb  # type: ignore[import-not-found, unused-ignore]

        client = logger.experiment
        artifact = wandb.Artifact(name=f"model-{client.id}", type="model", metadata={"original_name": path.name})
        artifact.add_dir(str(path.resolve()), name=path.name)
        client.log_artifact(artifact, aliases=["latest", "best"] if is_best else ["latest"])
