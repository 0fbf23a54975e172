"""Validation after a time: the clock of rank 0 decides for all ranks."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loops import evaluation_loop, fit_loop, training_epoch_loop
from lightning_utilities.core.imports import RequirementCache
from torch.utils.data import DataLoader

from lightning_megatron import LlamaModule, MegatronStrategy
from lightning_megatron.lightning.compat import _private
from lightning_megatron.testing.trainer import quiet_trainer

SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 32, "vocab_size": 64}
ROWS = [{"tokens": torch.arange(n, n + 16), "labels": torch.arange(n + 1, n + 17)} for n in range(40)]


class Validations(L.Callback):
    """A clock by which every batch takes a second, and the steps after which a rank has validated."""

    def __init__(self) -> None:
        self.now = 0.0
        self.steps: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.now += 1.0

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        self.steps.append(trainer.global_step)


def validated(axes: dict[str, int], interval: float) -> list[int]:
    """Steps after which a rank has validated; in the eyes of Lightning, an hour has always passed on rank 1."""
    seen, ahead = Validations(), 3600.0 * torch.distributed.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_epoch_loop, "time", SimpleNamespace(monotonic=lambda: seen.now + ahead))
        for module in (_private, fit_loop, evaluation_loop):
            patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: seen.now))
        how: dict[str, Any] = {"check_val_every_n_epoch": None, "limit_val_batches": 1, "max_steps": 14}
        how["val_check_interval"] = timedelta(seconds=interval)
        trainer = quiet_trainer(MegatronStrategy(**axes), callbacks=[seen], **how)
        trainer.fit(LlamaModule("llama-tiny", **SIZES, num_query_groups=2), DataLoader(ROWS), DataLoader(ROWS))  # type: ignore[arg-type]
    return seen.steps


@pytest.mark.skipif(not RequirementCache("lightning>=2.6"), reason="Lightning has this from 2.6 on")
@pytest.mark.parametrize("axes", [{"tp": 2}, {"pp": 2}, {}], ids=str)
def test_the_clock_of_rank_0_decides_on_validations(ranks: Any, axes: dict[str, int]) -> None:
    # Asked after a batch before the callback counts it: three seconds are over after the fourth.
    assert ranks(2, validated, axes, 2.5) == [[4, 8, 12]] * 2
    assert ranks(2, validated, axes, 1000.0) == [[], []]
