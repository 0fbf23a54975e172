"""A warning when ``ModelCheckpoint`` skips a save because its metric is not logged, which Lightning does silently."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn

from lightning_megatron.lightning.compat._private import steps_between_saves


def warn_of_missed_saves(trainer: Trainer, step: int) -> None:
    """Warn, before a batch, if ``step``, the one before it, should have been saved but had no metric; on all ranks."""
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, ModelCheckpoint) or callback.monitor is None or step == 0:
            continue
        every = steps_between_saves(callback)
        if every and step % every == 0 and callback.monitor not in trainer.callback_metrics:
            rank_zero_warn(
                f"ModelCheckpoint(monitor={callback.monitor!r}, every_n_train_steps={every}) has saved nothing yet: "
                f"{callback.monitor!r}, which it waits for, was not logged so far. If validation logs it, set "
                f"Trainer(val_check_interval=...) and leave every_n_train_steps out, or save without monitor."
            )
