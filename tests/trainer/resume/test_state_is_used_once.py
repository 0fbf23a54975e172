"""What a checkpoint brings is used by the run that resumes from it, and by nothing after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_megatron import LlamaModule, MegatronDataModule, MegatronStrategy
from lightning_megatron.data import IndexedDatasetWriter
from lightning_megatron.lightning.callbacks import MegatronLog, SpikeGuard
from lightning_megatron.testing.trainer import quiet_trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:Be aware that", "ignore:Checkpoint directory", "ignore:Total length", "ignore:You defined a"
)

SIZES = dict(num_layers=1, hidden_size=16, num_attention_heads=2, num_query_groups=2, ffn_hidden_size=32, vocab_size=64)
SAMPLES, STEP = 10, 3


class Counting(LlamaModule):
    def __init__(self) -> None:
        super().__init__("llama-tiny", **SIZES)
        self.batches: dict[int, int] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches[self.current_epoch] = self.batches.get(self.current_epoch, 0) + 1
        return super().training_step(batch, batch_idx)


def fit(data: Any, *callbacks: Callback, ckpt_path: Any = None, **options: Any) -> dict[int, int]:
    trainer = quiet_trainer(
        strategy=MegatronStrategy(), callbacks=list(callbacks), **{"max_epochs": 1, "limit_val_batches": 0, **options}
    )
    trainer.fit(model := Counting(), data, ckpt_path=ckpt_path)
    return model.batches


@pytest.fixture(scope="module")
def top(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("once")
    with IndexedDatasetWriter(str(folder / "text"), np.dtype(np.uint16)) as writer:
        writer.add_document(np.arange(16 * SAMPLES + 1) % 64, [16 * SAMPLES + 1])
    saves = ModelCheckpoint(folder, every_n_train_steps=STEP, save_top_k=-1, filename="{step}")
    callbacks = [saves, SpikeGuard(warmup=2), MegatronLog()]
    fit(data_module(folder), *callbacks, max_epochs=-1, max_steps=STEP, enable_checkpointing=True)
    return folder


def data_module(top: Path) -> MegatronDataModule:
    return MegatronDataModule(str(top / "text"), seq_length=16, split="1,0,0", train_samples=SAMPLES)


def test_the_place_in_the_data_is_that_of_the_first_epoch(top: Path) -> None:
    data, place = data_module(top), top / f"step={STEP}.ckpt"
    left = SAMPLES - STEP
    assert list(fit(data, ckpt_path=place, max_epochs=2).values()) == [left, SAMPLES]
    assert fit(data) == {0: SAMPLES}, "a new run with the same data module"
    reloads = fit(data_module(top), ckpt_path=place, max_epochs=3, reload_dataloaders_every_n_epochs=1)
    assert list(reloads.values()) == [left, SAMPLES, SAMPLES]


def test_a_place_that_no_epoch_has_used_is_dropped_by_the_next_run(top: Path) -> None:
    data = data_module(top)
    assert fit(data, ckpt_path=top / f"step={STEP}.ckpt", max_epochs=-1, max_steps=STEP) == {}
    quiet_trainer(strategy=MegatronStrategy()).validate(Counting(), data, verbose=False)
    assert fit(data) == {0: SAMPLES}


def test_callbacks_begin_anew_with_a_new_run(top: Path) -> None:
    guard, log = SpikeGuard(warmup=2), MegatronLog()
    batches = [{name: torch.arange(16)[None] % 64 for name in ("tokens", "labels")}] * STEP
    fit(data_module(top), guard, log, ckpt_path=top / f"step={STEP}.ckpt", max_epochs=-1, max_steps=2 * STEP)
    assert log.consumed.samples == 2 * STEP
    assert len(guard.state_dict()["losses"]) == 2 * STEP
    fit(DataLoader(batches, batch_size=None), guard, log)  # type: ignore[arg-type]
    assert log.consumed.samples == STEP
    assert len(guard.state_dict()["losses"]) == STEP


class Draws(Counting):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.drawn = torch.rand(())


def test_an_evaluation_of_a_checkpoint_leaves_random_numbers_as_in_stock_lightning(top: Path) -> None:
    """Evaluations draw what the script has seeded, and so does the run after them."""
    batches = [{name: torch.arange(16)[None] % 64 for name in ("tokens", "labels")}]
    trainer, drawn = quiet_trainer(strategy=MegatronStrategy(), max_steps=1), []
    for ckpt_path in (top / f"step={STEP}.ckpt", None):
        torch.manual_seed(5)
        trainer.validate(model := Draws(), batches, ckpt_path=ckpt_path, verbose=False)
        drawn.append((float(model.drawn), float(torch.rand(()))))
    assert drawn[0] == drawn[1]
