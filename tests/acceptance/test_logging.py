"""Checks 18-26: what is logged, and who decides by it."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import (
    CP2,
    DP2,
    EP2,
    LAYOUTS,
    LENGTH,
    ONE,
    PP2,
    STOCK,
    TP2,
    TP2PP2,
    Layout,
    Ranks,
    assert_close,
    fit,
    language_model,
    loader,
    on_all,
)
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ModelSummary,
    RichProgressBar,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor
from torchmetrics import CatMetric, MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_megatron import GPTModule
from lightning_megatron.testing import one_card

# 18, 19


class Measures(GPTModule):
    """Logs from a training step in all ways: numbers, metric objects, per step and per epoch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.right = MulticlassAccuracy(self.config.vocab_size, average="micro")
        self.val_right = MulticlassAccuracy(self.config.vocab_size, average="micro")
        self.mean, self.total, self.all_losses = MeanMetric(), SumMetric(), CatMetric()
        self.both = MetricCollection({"mean": MeanMetric(), "total": SumMetric()})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch["tokens"])
        labels = batch["labels"]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        tokens = torch.tensor(float(labels.numel()))
        self.right(logits.flatten(0, 1), labels.flatten())
        self.mean(loss.detach(), weight=tokens)
        self.total(tokens)
        self.all_losses.update(loss.detach())
        self.both(loss.detach())
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True, sync_dist=True)
        self.log("samples", float(len(labels)), reduce_fx="sum", sync_dist=True, on_step=False, on_epoch=True)
        self.log("largest", loss, reduce_fx="max", sync_dist=True, on_step=False, on_epoch=True)
        self.log("weighted", loss, batch_size=len(labels), sync_dist=True, on_step=True, on_epoch=True)
        self.log("right", self.right, on_step=True, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("total", self.total, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:  # computed twice without a new sample, and again after more: never from a stale cache
            self.log("mean_twice", self.both["mean"].compute() + self.both["mean"].compute())

    def on_train_epoch_end(self) -> None:
        self.log("computed_mean", self.both["mean"].compute())
        self.log("computed_total", self.both["total"].compute())
        self.log("losses", float(self.all_losses.compute().sum()))
        self.both.reset()
        self.all_losses.reset()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        logits = self(batch["tokens"])
        self.val_right.update(logits.flatten(0, 1), batch["labels"].flatten())
        self.log("val_right", self.val_right)
        self.log("val_samples", float(len(logits)), reduce_fx="sum", sync_dist=True)


class Metrics(Callback):
    """Everything that a callback can read after every batch."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []
        self.bar: list[dict[str, float]] = []

    def note(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self.seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        self.bar.append({name: float(value) for name, value in trainer.progress_bar_metrics.items()})  # type: ignore[arg-type]

    on_train_batch_end = on_train_epoch_end = on_validation_epoch_end = on_train_end = note


def measured(layout: Layout, directory: Path | None = None) -> Any:
    metrics, module = Metrics(), language_model(Measures, lr=1e-2)
    loggers: dict[str, Any] = {}
    if directory is not None:
        loggers["logger"] = [CSVLogger(directory, "csv", 0), TensorBoardLogger(directory, "board", 0)]
    fit(layout, module, None, loader(layout, 16), callbacks=[metrics], max_epochs=2, **loggers)
    return metrics.seen, metrics.bar


# Sums of losses, and the largest loss, know what a batch was cut into.
OF_MICRO_BATCHES = {"computed_total", "losses", "largest"}


def test_18_a_metric_of_the_last_stage_is_in_the_loggers_once(ranks: Ranks, tmp_path: Path) -> None:
    files = {}
    for layout in (ONE, PP2):
        seen = on_all(ranks, layout, measured, tmp_path / str(layout))
        with (tmp_path / str(layout) / "csv" / "version_0" / "metrics.csv").open() as file:
            files[layout] = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
        assert "train_loss_step" in seen[1][0]
    one, two = (
        [{k: v for k, v in row.items() if k not in OF_MICRO_BATCHES} for row in files[key]] for key in (ONE, PP2)
    )
    assert_close(two, one)
    steps = [row["step"] for row in files[PP2] if "train_loss_step" in row]
    assert steps == list(range(8))
    assert scalars(tmp_path / str(PP2)) == pytest.approx(scalars(tmp_path / str(ONE)), rel=1e-5)


def scalars(directory: Path) -> dict[tuple[str, int], float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "board" / "version_0")).Reload()
    names = set(events.Tags()["scalars"]) - OF_MICRO_BATCHES - {"epoch"}  # which Lightning adds to every call
    found = [(name, event.step, event.value) for name in names for event in events.Scalars(name)]
    once = {(name, step): value for name, step, value in found}
    assert len(once) == len(found) > 20
    return once


@pytest.mark.slow
def test_19_callback_metrics_are_identical_on_all_ranks_after_every_batch(ranks: Ranks) -> None:
    for layout in (TP2, PP2, TP2PP2):
        seen, bar = on_all(ranks, layout, measured)  # fails where ranks differ
        assert {"train_loss", "train_loss_step", "right_step", "lr", "grad_norm"} <= set(seen[0])
        assert "train_loss_step" in bar[0]


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param((ONE, PP2, DP2), marks=pytest.mark.gate),
        (TP2, TP2PP2, CP2, EP2),
    ],
    ids=str,
)
@pytest.mark.slow
def test_20_and_21_sums_and_metric_objects_count_every_sample_once(ranks: Ranks, layouts: tuple[Layout, ...]) -> None:
    expected, _ = on_all(ranks, STOCK, measured)
    last = expected[-1]
    assert (last["samples"], last["total_epoch"], last["val_samples"]) == (32, 32 * LENGTH, 16)
    for layout in layouts:
        for seen, _ in ranks(layout.world_size, measured, layout):
            ours = seen[-1]
            # Per step a metric object shows what its own rank saw, here as in stock DDP.
            ignored = {"grad_norm"} | OF_MICRO_BATCHES
            ignored |= {"right_step", "right", "total_step", "total"} if layout.dp > 1 else set()
            names = last.keys() - ignored
            assert ours.keys() - {"grad_norm"} == last.keys() - {"grad_norm"}
            assert_close({name: ours[name] for name in names}, {name: last[name] for name in names})
            micro_batches = 2 if layout.pp > 1 else layout.dp
            assert ours["computed_total"] == pytest.approx(last["computed_total"] * micro_batches, rel=1e-2)
            assert ours["losses"] == pytest.approx(last["losses"] * micro_batches, rel=1e-2)


# 22


class Forks(GPTModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("by_epoch", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.log("sized", loss, on_step=False, on_epoch=True, batch_size=3, sync_dist=True)
        self.log_dict({"a": loss, "b": 2 * loss}, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", self.loss(batch), on_step=True, on_epoch=True, sync_dist=True)


def forked(layout: Layout) -> list[dict[str, float]]:
    class Bare(Forks):  # what GPTModule itself logs, stock cannot
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            return None

        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            return None

    validation = loader(layout, 20)
    _, recorder = fit(layout, language_model(Bare), None, validation, log_every_n_steps=3, max_epochs=2)
    return recorder.rows


@pytest.mark.slow
def test_22_names_intervals_and_weights_are_those_of_stock(ranks: Ranks) -> None:
    expected = on_all(ranks, STOCK, forked)
    assert {"loss_step", "loss_epoch", "by_epoch", "val_step", "val_epoch", "sized"} <= set().union(*expected)
    for layout in LAYOUTS:
        assert_close(on_all(ranks, layout, forked), expected)


# 23


class Divided(GPTModule):
    """Every rank logs something else from an ordinary hook."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log(f"of_stage_{self.mesh.pp.rank}", float(batch_idx), on_step=True, on_epoch=True)
        if self.mesh.pp.rank == 0:
            self.log_dict({"first": 1.0, "again": 2.0})


def divided(layout: Layout) -> set[str]:
    trainer, _ = fit(layout, language_model(Divided), max_epochs=2)
    return {name for name in trainer.callback_metrics if "stage" in name or name in ("first", "again")}


def test_23_stages_may_log_different_keys_from_hooks(ranks: Ranks) -> None:
    names = {f"of_stage_{stage}{form}" for stage in (0, 1) for form in ("", "_step", "_epoch")}
    for layout in (PP2, TP2PP2):
        for rank, found in enumerate(ranks(layout.world_size, divided, layout)):
            stage = rank // layout.tp
            own = {name for name in names if f"stage_{stage}" in name}
            assert found == own | ({"first", "again"} if stage == 0 else set())


# 24


def monitored(layout: Layout, directory: Path) -> Mapping[str, list[float]]:
    throughput = ThroughputMonitor(
        batch_size_fn=lambda batch: len(batch["tokens"]), length_fn=lambda batch: batch["tokens"].numel()
    )
    monitors = [LearningRateMonitor("step"), throughput, DeviceStatsMonitor(cpu_stats=True), ModelSummary(2)]
    _, recorder = fit(layout, None, None, loader(layout), callbacks=monitors)
    assert any(name.startswith("DeviceStatsMonitor") for row in recorder.rows for name in row)
    # By the class of the optimizer, of which devices may have one of their own.
    rates = next(name for row in recorder.rows for name in row if re.fullmatch(r"lr-\w*AdamW/pg1", name))
    wanted = {"lr": rates, "batches": "train/batches", "samples": "train/samples"}
    return {word: recorder.series(name) for word, name in wanted.items()}


@pytest.mark.slow
def test_24_monitors_run_and_count_batches_of_the_optimizer(ranks: Ranks, tmp_path: Path) -> None:
    for layout in LAYOUTS:
        series = ranks(layout.world_size, monitored, layout, tmp_path)[0]
        assert series["lr"] == [1e-3] * 4
        assert series["batches"] == [1, 2, 3, 4]
        assert series["samples"] == [layout.batch_size * i for i in (1, 2, 3, 4)]


def totals(layout: Layout, kind: type[Any]) -> tuple[int | float, int]:
    bar = kind()
    trainer, _ = fit(layout, callbacks=[bar], enable_progress_bar=True, accumulate_grad_batches=2)
    return bar.total_train_batches, trainer.global_step


@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
def test_24_progress_bars_run(ranks: Ranks, kind: type[Any]) -> None:
    for layout in (ONE, PP2, DP2):
        assert on_all(ranks, layout, totals, kind) == (4, 2)


# 25


class Schedules(GPTModule):
    """Halves its learning rate when the loss does not fall by much."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.05)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)


def decided(layout: Layout, monitor: str) -> tuple[int, int, float]:
    stop = EarlyStopping(monitor, patience=1, min_delta=0.01, check_on_train_epoch_end=monitor == "train_loss")
    module = language_model(Schedules, lr=5e-3)
    trainer, _ = fit(layout, module, None, loader(layout), callbacks=[stop], max_epochs=12)
    return trainer.current_epoch, stop.stopped_epoch, trainer.optimizers[0].param_groups[0]["lr"]


@pytest.mark.slow
@pytest.mark.parametrize("monitor", ["train_loss", pytest.param("val_loss", marks=pytest.mark.exhaustive)])
def test_25_early_stopping_and_plateaus_are_decided_alike(ranks: Ranks, monitor: str) -> None:
    expected = on_all(ranks, STOCK, decided, monitor)
    assert 1 < expected[0] < 12
    assert expected[2] < 5e-3
    for layout in LAYOUTS:
        assert on_all(ranks, layout, decided, monitor) == expected, layout


class Slow(GPTModule):
    """Ranks are not equally fast, so their clocks disagree on whether the time is up."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        import time

        time.sleep(0.02 * (1 + self.trainer.global_rank))


def timed(layout: Layout) -> int:
    timer = Timer({"milliseconds": 300})
    trainer, _ = fit(layout, language_model(Slow), callbacks=[timer], max_epochs=50)
    return trainer.global_step


def test_25_the_timer_stops_all_ranks_at_one_step(ranks: Ranks) -> None:
    for layout in (PP2, DP2):
        assert 0 < on_all(ranks, layout, timed) < 200


# 26


def profiled(layout: Layout, name: str, directory: Path) -> list[str]:
    from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler

    kinds: dict[str, Any] = {"simple": SimpleProfiler, "advanced": AdvancedProfiler, "pytorch": PyTorchProfiler}
    fit(layout, profiler=kinds[name](dirpath=directory, filename="report"), max_epochs=2)
    return []


@pytest.mark.skipif(one_card.enabled(), reason="ranks that share a card count as a machine each")
@pytest.mark.parametrize("name", ["simple", "advanced", pytest.param("pytorch", marks=pytest.mark.slow)])
def test_26_profilers_report_once_per_rank(ranks: Ranks, tmp_path: Path, name: str) -> None:
    ranks(2, profiled, PP2, name, tmp_path)
    reports = sorted(path for path in tmp_path.iterdir() if path.suffix == ".txt")
    assert [path.name for path in reports] == ["fit-report-0.txt", "fit-report-1.txt"]
    expected = {
        "simple": "[Strategy]MegatronStrategy.training_step",
        "advanced": "training_step",
        "pytorch": "MegatronStrategy.training",
    }
    assert all(expected[name] in path.read_text() for path in reports)
