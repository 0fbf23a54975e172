"""Speed by hand numbers: training moves a clock of the test's own, so every figure is exact."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, ThroughputMonitor, throughput_monitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_megatron import LlamaModule, MegatronStrategy, Throughput
from lightning_megatron.lightning.callbacks import throughput

SEQ, BATCH = 8, 2
TINY: dict[str, Any] = {"num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 32, "vocab_size": 64}
TINY |= {"num_attention_heads": 2, "num_query_groups": 1, "max_position_embeddings": SEQ}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Tokens(Dataset[dict[str, Tensor]]):
    """Fetching the first sample of a batch takes a while."""

    def __init__(self, clock: Clock, batches: int, fetch: float) -> None:
        self.clock, self.batches, self.fetch = clock, batches, fetch

    def __len__(self) -> int:
        return self.batches * BATCH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.clock.now += self.fetch if index % BATCH == 0 else 0.0
        tokens = torch.arange(SEQ + 1)
        return {"tokens": tokens[:-1], "labels": tokens[1:]}


class Timed(LlamaModule):
    """Steps take the seconds they are told to."""

    def __init__(self, clock: Clock, seconds: list[float]) -> None:
        super().__init__("llama-tiny", **TINY)
        self.clock, self.seconds = clock, iter(seconds)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.clock.now += next(self.seconds)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.clock.now += 1000.0


class Records(Logger):
    """Keeps what is logged."""

    name, version = "records", 0

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.setdefault(step or 0, {}).update(metrics)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Lightning's launcher leaves ranks in it, and the next process would believe them."""
    with patch.dict(os.environ):
        yield


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(throughput, "perf_counter", clock)
    return clock


def fit(clock: Clock, seconds: list[float], tmp_path: Path, **options: Any) -> tuple[dict[int, dict[str, float]], Any]:
    records, callback = Records(), Throughput()
    options = {"callbacks": [callback], "limit_val_batches": 0, "fetch": 0.0} | options
    fetch = options.pop("fetch")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy="megatron",
        max_epochs=1,
        log_every_n_steps=2,
        logger=records,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in options["callbacks"]),
        default_root_dir=tmp_path,
        **options,
    )
    loader = DataLoader(Tokens(clock, len(seconds), fetch), batch_size=BATCH)
    trainer.fit(Timed(clock, seconds), loader, DataLoader(Tokens(clock, 1, 0.0), batch_size=BATCH))
    return records.rows, callback


def test_median_slowest_and_rates_of_each_window(clock: Clock, tmp_path: Path) -> None:
    rows, callback = fit(clock, [1.0, 3.0, 2.0, 2.0], tmp_path)
    first, second = rows[1], rows[3]
    assert first["step_time_ms"] == pytest.approx(2000)
    assert first["step_time_ms_slowest"] == first["step_time_ms_p95"] == pytest.approx(3000)
    assert first["samples_per_second"] == pytest.approx(2 * BATCH / 4.0)
    assert first["tokens_per_second"] == pytest.approx(2 * BATCH * SEQ / 4.0)
    # 6 x (matrices: q and o 2 x 16 x 16, k and v 2 x 16 x 8, three of 16 x 32; head 16 x 64) + attention 6 x 16 x 8.
    flops = 6 * (16 * (2 * 16 + 2 * 8 + 3 * 32) + 16 * 64) + 6 * 16 * SEQ
    assert first["tflops_per_device"] == pytest.approx(flops * 2 * BATCH * SEQ / 4.0 / 1e12)
    assert "mfu" not in first, "a CPU's peak is unknown"
    assert second["step_time_ms_slowest"] == pytest.approx(2000)
    assert callback.total.tokens == 4 * BATCH * SEQ
    assert callback.total.seconds == pytest.approx(8.0)


def test_waiting_for_data_counts(clock: Clock, tmp_path: Path) -> None:
    rows, _ = fit(clock, [1.0] * 4, tmp_path, fetch=0.5)
    assert rows[3]["step_time_ms"] == pytest.approx(1500)


def test_validation_and_checkpoints_do_not_count(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(*args: Any, **kwargs: Any) -> None:
        clock.now += 500.0

    monkeypatch.setattr(MegatronStrategy, "save_checkpoint", save)
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    callback = Throughput()
    rows, _ = fit(
        clock,
        [1.0] * 4,
        tmp_path,
        callbacks=[callback, saves],
        limit_val_batches=1,
        val_check_interval=1,
        num_sanity_val_steps=0,
    )
    assert clock.now > 4 * 1500, "validation and checkpoints did happen"
    assert callback.total.seconds == pytest.approx(4.0)
    assert rows[3]["step_time_ms_slowest"] == pytest.approx(1000)


def test_a_step_is_an_optimizer_step(clock: Clock, tmp_path: Path) -> None:
    rows, callback = fit(clock, [1.0] * 8, tmp_path, accumulate_grad_batches=2)
    assert callback.total.samples == 8 * BATCH
    assert rows[1]["step_time_ms"] == pytest.approx(2000)
    assert rows[1]["tokens_per_second"] == pytest.approx(BATCH * SEQ)


def test_mfu_where_the_peak_is_known(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "peak_flops", lambda device: 1e6)
    rows, _ = fit(clock, [1.0] * 2, tmp_path)
    assert rows[1]["mfu"] == pytest.approx(rows[1]["tflops_per_device"] * 1e12 / 1e6)


def test_agrees_with_lightnings_own_monitor(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput_monitor, "time", SimpleNamespace(perf_counter=clock))

    class Sleeper(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            clock.now += 0.05
            return self.weight * batch.sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    monitor = ThroughputMonitor(batch_size_fn=len, length_fn=lambda batch: batch.numel(), window_size=10)
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=20,
        log_every_n_steps=10,
        logger=CSVLogger(tmp_path),
        callbacks=[Throughput(), monitor],
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    records = Records()
    trainer.loggers = [records]
    trainer.fit(Sleeper(), DataLoader(torch.arange(80).reshape(40, 2), batch_size=2))
    row = records.rows[19]
    assert row["samples_per_second"] == pytest.approx(row["train/device/samples_per_sec"]) == pytest.approx(40.0)
    assert row["tokens_per_second"] == pytest.approx(row["train/device/items_per_sec"]) == pytest.approx(80.0)


def test_the_95th_percentile_leaves_out_the_slowest_of_twenty() -> None:
    assert throughput.percentile([float(n) for n in range(20, 0, -1)], 0.95) == 19.0
    assert throughput.percentile([1.0, 9.0], 0.95) == 9.0
