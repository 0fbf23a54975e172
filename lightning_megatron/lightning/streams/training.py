"""Training ends on all ranks alike, or in an error on all."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer

from lightning_megatron.comm.objects import all_gather_object
from lightning_megatron.errors import DataError
from lightning_megatron.lightning.streams.lengths import STREAM, are_certain, refuse_uneven
from lightning_megatron.lightning.streams.vote import Next, StreamVote
from lightning_megatron.mesh import ParallelMesh

_DATA, _LIMIT = "training data", "limit_train_batches"


def _due(trainer: Trainer, begun: int) -> float:
    """Batches that ``max_steps`` lets training read yet; infinitely many if it says nothing.

    Args:
        trainer: in training.
        begun: batches of this epoch that it has read.
    """
    if trainer.max_steps == -1 or not trainer.lightning_module.automatic_optimization:
        return STREAM
    batches = trainer.accumulate_grad_batches
    return (trainer.max_steps - trainer.global_step) * batches - begun % batches


def _reads_on(trainer: Trainer, batches: float) -> bool:
    """True if training will come to the end of so many batches, as far as can be known."""
    if any(isinstance(callback, Timer) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        return False
    knows = trainer.max_steps == -1 or trainer.lightning_module.automatic_optimization
    return knows and _due(trainer, 0) > batches


class TrainingWatch(Callback):
    """Compares numbers of batches before training, and where data do not know theirs, lets ranks vote at each batch.

    ``MegatronStrategy`` brings it along, as the first callback.

    Args:
        mesh: this rank's.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        self._vote = StreamVote()
        self._is_compared = self._foresees = False
        self._begun = 0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare, once for each set of loaders.

        Raises:
            DataError: on all ranks.
        """
        self._begun = 0
        reloads = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
        if not self._mesh.is_distributed or (self._is_compared and not reloads):
            return
        self._is_compared = True
        count = trainer.num_training_batches
        told = all_gather_object(self._mesh, (count, are_certain([count], trainer.train_dataloader)))
        counts, all_certain = [count for count, _ in told], all(certain for _, certain in told)
        if all_certain and _reads_on(trainer, min(counts)):
            refuse_uneven({rank: [count] for rank, count in enumerate(counts)}, _DATA, _LIMIT)
        self._vote = (
            StreamVote() if all_certain and len(set(counts)) == 1 else StreamVote(self._mesh.host, _DATA, _LIMIT)
        )
        # Lightning reads streams without a limit one batch ahead, and so can say which one is the last.
        self._foresees = all_certain or all(count == STREAM for count in counts)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Vote; the answer is awaited before the first step of an epoch, and where nobody can foresee the end.

        Raises:
            DataError: on all ranks.
        """
        self._begun += 1
        progress = trainer.fit_loop.epoch_loop.batch_progress
        ready = progress.current.ready
        is_last = self._foresees and progress.is_last_batch and _due(trainer, ready - 1) > 1
        self._vote.begin(Next.LAST if is_last else Next.MORE, ready)
        if self._begun == 1 or not self._foresees:
            self._vote.settle()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Hear the answer, after a step in which all ranks took part.

        Raises:
            DataError: on all ranks.
        """
        self._vote.settle()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Vote where others may have another batch, and refuse an epoch without any: there could be one for ever.

        Raises:
            DataError: on all ranks.
        """
        batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if self._begun == 0 or not self._foresees:
            self._vote.begin(Next.NOTHING, batches)
            self._vote.settle()
        if batches == 0 and not trainer.should_stop:
            raise DataError(
                f"the {_DATA} gave no batch in epoch {trainer.current_epoch}. They must begin anew each time they are"
                " iterated over: an iterator or a generator that is used up does not; or a filter leaves nothing"
            )
