"""Hooks that Lightning skips: it calls none that is ``None``, and all others."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_megatron.lightning.compat.skipped_hooks import STEP_HOOKS, skip, skip_missing


class Noted(Callback):
    """A callback that notes two hooks of a step."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.seen.append("start")

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append("end")


def test_lightning_calls_the_hooks_of_a_callback_that_are_not_skipped() -> None:
    whole, part = Noted(), Noted()
    for each in (whole, part):
        skip_missing(each)
        assert {hook for hook in STEP_HOOKS if getattr(each, hook) is None} == {
            "on_before_zero_grad",
            "on_before_backward",
            "on_after_backward",
            "on_before_optimizer_step",
        }
    skip(part, "on_train_batch_start")
    torch.manual_seed(0)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=2,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[whole, part],
    )
    trainer.fit(BoringModel())
    assert whole.seen == ["start", "end"] * 2
    assert part.seen == ["end"] * 2
