"""Training by samples: ramps of the global batch, schedules, the end, and runs that go on in mid-ramp."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_megatron import LlamaModule, MegatronDataModule, MegatronStrategy
from lightning_megatron.data import IndexedDatasetWriter
from lightning_megatron.errors import ConfigError
from lightning_megatron.testing.trainer import Recorder, quiet_trainer

TINY: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": 131,
    "max_position_embeddings": 16,
    "vocab_multiple": 4,
}
RATES = {"lr": 1e-2, "min_lr": 1e-3, "lr_schedule": "cosine", "warmup_samples": 10, "decay_samples": 50}
DECAY = {"weight_decay": 0.2, "start_weight_decay": 0.05, "weight_decay_schedule": "linear"}
SIZES = [4, 4, 4, 8, 8, 12, 12]
"""Global batches of the ramp (4, 4, 24) to 12: a step of it has 24 / 2 = 12 samples."""
SAMPLES = 55


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("data") / "tokens")
    random = np.random.default_rng(1)
    with IndexedDatasetWriter(path, np.dtype(np.uint16)) as writer:
        for _ in range(40):
            writer.add_item(random.integers(0, 131, 50).astype(np.uint16))
            writer.end_document()
    return path


def data_of(prefix: str, folder: str, **given: Any) -> MegatronDataModule:
    sizes = {"global_batch_size": 12, "rampup_batch_size": (4, 4, 24), "train_samples": SAMPLES}
    return MegatronDataModule(prefix, 16, cache_dir=folder, split="1", **sizes | given)


def train(
    prefix: str, folder: str, strategy: dict[str, Any], ckpt_path: str | None = None, **given: Any
) -> dict[str, list[float]]:
    """Loss, gradient norm, learning rate and weight decay of each step, and the step at which training ended."""
    seed_everything(7, verbose=False)
    recorder = Recorder()
    saver = ModelCheckpoint(Path(folder), filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = quiet_trainer(
        MegatronStrategy(**strategy),
        logger=recorder,
        enable_checkpointing=True,
        callbacks=[saver],
        gradient_clip_val=1.0,
        limit_val_batches=0,
    )
    module = Watched("llama-tiny", **RATES, **DECAY, **TINY)
    trainer.fit(module, data_of(prefix, folder, **given), ckpt_path=ckpt_path)
    found = {name: recorder.series(name) for name in ("train_loss", "grad_norm")}
    found["lr"] = module.rates
    return found | {"decay": module.decay, "samples": module.samples, "end": [trainer.global_step, trainer.max_steps]}


class Watched(LlamaModule):
    """Notes the learning rate, the weight decay and the samples of each step, of this replica."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rates: list[float] = []
        self.decay: list[float] = []
        self.samples: list[int] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.samples.append(len(batch["tokens"]))
        (optimizer,) = self.trainer.optimizers
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.decay.append(optimizer.param_groups[0]["weight_decay"])


def expected(consumed: int) -> tuple[float, float]:
    """Learning rate and weight decay after ``consumed`` samples, by Megatron-LM's formulas."""
    decay = 0.05 + 0.15 * min(1.0, consumed / SAMPLES)
    if consumed <= 10:
        return 1e-2 * consumed / 10, decay
    if consumed > 50:
        return 1e-3, decay
    return 1e-3 + 9e-3 * (1 + math.cos(math.pi * (consumed - 10) / 40)) / 2, decay


def around(prefix: str, folder: str, first: dict[str, Any], second: dict[str, Any]) -> Any:
    """A whole run, and one that goes on in mid-ramp under another layout."""
    return train(prefix, folder, first), train(prefix, folder, second, f"{folder}/step=4.ckpt")


ONE, DP2, TP2 = {"micro_batch_size": 2}, {"micro_batch_size": 1}, {"tp": 2, "micro_batch_size": 4}


def test_a_ramp_and_schedules_by_samples(prefix: str, tmp_path: Path) -> None:
    whole = train(prefix, str(tmp_path), {})
    assert whole["samples"] == SIZES
    positions = [sum(SIZES[:step]) for step in range(len(SIZES))]
    assert whole["lr"] == pytest.approx([expected(at)[0] for at in positions], rel=1e-12)
    assert whole["decay"] == pytest.approx([expected(at)[1] for at in positions], rel=1e-12)
    # 52 of 55 samples: the last ones do not fill a batch. Afterwards the Trainer has its own limit again.
    assert whole["end"] == [7, -1]


@pytest.mark.parametrize(("first", "second"), [(DP2, DP2), (DP2, TP2)], ids=["the same layout", "dp 2, then tp 2"])
def test_a_run_goes_on_in_mid_ramp(ranks, prefix, tmp_path, first, second):
    one = train(prefix, str(tmp_path / "one"), {"micro_batch_size": 2})
    for whole, resumed in ranks(2, around, prefix, str(tmp_path), first, second):
        assert whole["samples"] == [size // 2 for size in SIZES]
        for name in ("train_loss", "grad_norm", "lr", "decay"):
            assert whole[name] == pytest.approx(one[name], rel=1e-5), name
            assert resumed[name] == pytest.approx(whole[name][4:], rel=0 if first == second else 1e-5), name
        assert resumed["end"] == [7, -1]


def test_a_plain_loader_counts_all_batches_of_a_step() -> None:
    """Six batches of two samples make three steps of four: the rate is that after the samples read until then."""
    rows = [{"tokens": torch.arange(16) + shift, "labels": torch.arange(16) + shift + 1} for shift in range(12)]
    trainer = quiet_trainer(MegatronStrategy(), max_epochs=1, accumulate_grad_batches=2)
    module = Watched("llama-tiny", **RATES, **TINY)
    trainer.fit(module, DataLoader(rows, 2))  # type: ignore[arg-type]
    assert module.samples == [2] * 6
    assert module.rates == pytest.approx([expected(at)[0] for at in (0, 0, 4, 4, 8, 8)], rel=1e-12)


def test_more_samples_later(prefix: str, tmp_path: Path) -> None:
    folder = str(tmp_path)
    train(prefix, folder, {})
    longer = train(prefix, folder, {}, f"{folder}/step=6.ckpt", train_samples=100)
    assert longer["samples"] == [12, 12, 12, 12, 12]
    assert longer["lr"] == pytest.approx([expected(at)[0] for at in range(40, 100, 12)], rel=1e-12)


def refused(prefix: str, folder: str, fit: dict[str, Any] | None = None, **given: Any) -> str:
    ckpt_path = (fit or {}).pop("ckpt_path", None)
    trainer = quiet_trainer(MegatronStrategy(micro_batch_size=2), limit_val_batches=0, **fit or {})
    with pytest.raises(ConfigError) as raised:
        trainer.fit(LlamaModule("llama-tiny", **RATES, **TINY), data_of(prefix, folder, **given), ckpt_path=ckpt_path)
    return str(raised.value)


def test_what_cannot_be_is_refused_before_training(prefix: str, tmp_path: Path) -> None:
    folder = str(tmp_path)
    train(prefix, folder, {"micro_batch_size": 2})
    both = refused(prefix, folder, {"max_steps": 5})
    assert "max_steps=5: train_samples=55 is a length of training, too" in both
    # A schedule in samples is enough.
    plain = {"global_batch_size": None, "rampup_batch_size": None, "batch_size": 4}
    assert "max_steps=5: train_samples=55" in refused(prefix, folder, {"max_steps": 5}, **plain)
    assert "global_batch_size=13: is no multiple of dp x micro_batch_size = 2; nearest valid: 12, 14" in refused(
        prefix, folder, global_batch_size=13, rampup_batch_size=None
    )
    odd = refused(prefix, folder, rampup_batch_size=[3, 3, 24])
    assert "rampup_batch_size=(3, 3, 24): its global batch of 3 samples is no multiple of" in odd
    assert "nearest valid: (2, 2, 24)" in odd
    assert "accumulate_grad_batches=2" in refused(prefix, folder, {"accumulate_grad_batches": 2})
    last = {"ckpt_path": f"{folder}/step=6.ckpt"}
    other = refused(prefix, folder, dict(last), global_batch_size=16)
    assert "global_batch_size=16: the checkpoint was trained with 12 samples a step" in other
    assert "batch_size=8: makes steps of 8 samples over dp 1, and the checkpoint was trained with 12" in refused(
        prefix, folder, dict(last), **plain | {"batch_size": 8}
    )
    assert "rampup_batch_size=None: is not that of the checkpoint" in refused(
        prefix, folder, dict(last), rampup_batch_size=None
    )


def test_train_samples_end_a_run_without_other_limits(prefix: str, tmp_path: Path) -> None:
    for limits, steps in (({}, 5), ({"max_steps": 3}, 3)):
        trainer = quiet_trainer(MegatronStrategy(), limit_val_batches=0, **limits)
        data = MegatronDataModule(prefix, 16, 4, cache_dir=tmp_path, split="1", train_samples=20)
        trainer.fit(LlamaModule("llama-tiny", **TINY), data)
        assert trainer.global_step == steps
