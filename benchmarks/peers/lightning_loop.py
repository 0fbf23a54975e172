"""A Lightning Trainer as a contestant: the callback that talks to the driver, and the arguments that all share."""

from __future__ import annotations

from typing import Any

import lightning as L
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from peers.protocol import CLIP, Job, RandomTokens, Rounds


class RoundsCallback(L.Callback):
    """Waits for the driver's command before each round of steps, and reports after it."""

    def __init__(self, job: Job, batches_per_step: int) -> None:
        self._rounds = Rounds(job)
        self._batches = job.steps * batches_per_step
        self._per_step = batches_per_step
        self._losses: list[float] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % self._batches == 0:
            self._rounds.begin()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = trainer.strategy.reduce(trainer.callback_metrics["train_loss"], reduce_op="mean")
        self._losses = [*self._losses, float(loss)][-self._per_step :]
        if (batch_idx + 1) % self._batches == 0:
            self._rounds.end(sum(self._losses) / len(self._losses))


class Tokens(L.LightningDataModule):
    """The comparison's tokens in their order, divided among the replicas of a data-parallel layout.

    Lightning's own sampler would shuffle them.
    """

    def __init__(self, job: Job, vocab_size: int, batch_size: int) -> None:
        super().__init__()
        self._job = job
        self._dataset = RandomTokens(vocab_size, job.seq)
        self._batch_size = batch_size

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Batches of this process."""
        divided = self._job.replicas > 1
        sampler: Any = DistributedSampler(self._dataset, shuffle=False) if divided else None
        return DataLoader(self._dataset, self._batch_size, sampler=sampler)


def fit(
    job: Job, module: L.LightningModule, vocab_size: int, strategy: Any, *, precision: str, batches_per_step: int
) -> None:
    """Train a module with a Trainer until the driver ends the process.

    Args:
        job: the training.
        module: module that logs ``train_loss``.
        vocab_size: number of different tokens.
        strategy: Trainer's ``strategy``.
        precision: Trainer's ``precision``.
        batches_per_step: batches that this Trainer accumulates for one optimizer step.
    """
    size = job.micro_batch * job.own_micro_batches // batches_per_step
    trainer = L.Trainer(
        accelerator=job.accelerator,
        devices=job.devices,
        strategy=strategy,
        precision=precision,  # type: ignore[arg-type]
        max_steps=-1,
        accumulate_grad_batches=batches_per_step,
        gradient_clip_val=CLIP,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[RoundsCallback(job, batches_per_step)],
    )
    trainer.fit(module, Tokens(job, vocab_size, size))
