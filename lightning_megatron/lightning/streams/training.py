"""Check that training ends after the same batch on all ranks."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_megatron.data.loading.plain_loader import PlainDataLoader
from lightning_megatron.errors import DataError
from lightning_megatron.lightning.compat.skipped_hooks import skip
from lightning_megatron.lightning.streams.batch_watch import BatchWatch
from lightning_megatron.lightning.streams.end_of_data import DataState, EndOfDataCheck
from lightning_megatron.lightning.streams.lengths import STREAM, gather_counts, require_equal_lengths
from lightning_megatron.mesh import ParallelMesh

_DATA, _LIMIT = "training data", "limit_train_batches"


def _batches_left(trainer: Trainer, begun: int) -> float:
    """Number of batches left before ``max_steps``, after ``begun`` in this epoch; infinite without that limit."""
    if trainer.max_steps == -1 or not trainer.lightning_module.automatic_optimization:
        return STREAM
    batches = trainer.accumulate_grad_batches
    return (trainer.max_steps - trainer.global_step) * batches - begun % batches


def _reaches_end(trainer: Trainer, batches: float) -> bool:
    """True if training is known to want more than this number of batches."""
    if any(isinstance(callback, Timer) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        return False
    knows = trainer.max_steps == -1 or trainer.lightning_module.automatic_optimization
    return knows and _batches_left(trainer, 0) > batches


class TrainingWatch(Callback):
    """Compares numbers of batches before training; if they are not known in advance, checks at each batch.

    ``MegatronStrategy`` adds this as the first callback. Any difference is a ``DataError`` on all ranks.

    Args:
        batches: watch over the batches, notified of the start and end of each.
    """

    reads_parameters = False

    def __init__(self, mesh: ParallelMesh, batches: BatchWatch) -> None:
        self._mesh, self._batches = mesh, batches
        self._check = EndOfDataCheck()
        self._is_compared = self._foresees = False
        self._begun = 0
        if not mesh.is_distributed:
            skip(self, "on_train_batch_start", "on_train_batch_end")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let a plain loader and Lightning agree where a resumed epoch goes on."""
        loader, count = trainer.train_dataloader, trainer.fit_loop.epoch_loop.batch_progress.current
        if trainer.ckpt_path and isinstance(loader, PlainDataLoader) and count.ready:
            epoch, limit = trainer.current_epoch, int(trainer.num_training_batches)
            if not loader.position.is_restored and count.ready < limit:
                rank_zero_warn(
                    f"the checkpoint was saved after {count.ready} of {limit} batches of an epoch, and has no position"
                    " in the data. The epoch's first batches are read again, as in stock Lightning"
                )
            # A checkpoint may be written before the last batch counts as completed: the difference stays.
            ahead = count.ready - loader.position.agree_on_batches(epoch, count.ready, limit)
            for name in ("ready", "started", "processed", "completed"):
                setattr(count, name, getattr(count, name) - ahead)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare random generators, from which loaders draw next; numbers of batches once for each set of loaders."""
        self._begun = 0
        self._batches.compare()
        reloads = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
        if not self._mesh.is_distributed or (self._is_compared and not reloads):
            return
        self._is_compared = True
        counts, certain = gather_counts(self._mesh, [trainer.num_training_batches], trainer.train_dataloader)
        if certain and _reaches_end(trainer, min(counts)[0]):
            require_equal_lengths(dict(enumerate(counts)), _DATA, _LIMIT)
        is_even = certain and min(counts) == max(counts)
        self._check = EndOfDataCheck(None if is_even else self._mesh.host, _DATA, _LIMIT)
        # Lightning reads streams without a limit one batch ahead, so it knows the last batch.
        self._foresees = certain or all(count == [STREAM] for count in counts)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the check; wait for it before the first step of an epoch, and if the end cannot be foreseen."""
        self._batches.begin_batch(pl_module)
        self._begun += 1
        progress = trainer.fit_loop.epoch_loop.batch_progress
        ready = progress.current.ready
        is_last = self._foresees and progress.is_last_batch and _batches_left(trainer, ready - 1) > 1
        self._check.begin(DataState.LAST if is_last else DataState.MORE, ready)
        if self._begun == 1 or not self._foresees:
            self._check.settle()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Wait for the check, after a step in which all ranks took part."""
        self._check.settle()
        self._batches.end_batch(pl_module, batch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that no other rank has another batch; refuse an epoch without batches, which could repeat forever."""
        batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if self._begun == 0 or not self._foresees:
            self._check.begin(DataState.ENDED, batches)
            self._check.settle()
        if batches == 0 and not trainer.should_stop:
            raise DataError(
                f"the {_DATA} gave no batch in epoch {trainer.current_epoch}. They must start again each time they are"
                " iterated over: an iterator or a generator that is used up does not; or a filter leaves nothing"
            )
