"""Counters of Gaudi's software in a run: compiled graphs, and ops that fall back to the host."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import simulated_gaudi as hpu
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch.utils.data import DataLoader

from lightning_megatron import DeviceProfiler, GaudiTelemetry, LlamaModule, MegatronStrategy
from lightning_megatron import device as devices
from lightning_megatron.lightning.monitoring.first_steps import FirstSteps, summary
from lightning_megatron.testing.trainer import Recorder, quiet_trainer
from tests.tiny import tiny_llama

HPU = torch.device("hpu")


class FallsBack(Callback):
    """Two calls of an op without a kernel in the second step, and one in the third."""

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        for _ in range({1: 2, 2: 1}.get(trainer.global_step, 0)):
            hpu.fall_back("aten::linalg_qr.out")


def fit(*callbacks: Callback, **options: Any) -> Recorder:
    seed_everything(3, verbose=False)
    recorder = Recorder()
    trainer = quiet_trainer(MegatronStrategy(**options), max_steps=4, callbacks=list(callbacks), logger=recorder)
    tokens = torch.randint(40, (16, 9), generator=torch.Generator().manual_seed(0))
    rows = [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]
    trainer.fit(LlamaModule(tiny_llama(), lr=1e-3), DataLoader(rows, batch_size=4))  # type: ignore[arg-type]
    return recorder


def test_fallbacks_are_counted_by_step_and_by_op(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    telemetry = GaudiTelemetry()
    recorder = fit(telemetry, FallsBack())
    (own,) = telemetry.ranks
    assert own.counts
    assert own.fallbacks == {"aten::linalg_qr.out": 3}
    assert own.last_fallback == 3
    rows = {row["step"]: row["telemetry/cpu_fallbacks"] for row in recorder.rows if "telemetry/cpu_fallbacks" in row}
    assert rows == {2.0: 2.0, 3.0: 1.0}
    assert "CPU fallbacks aten::linalg_qr.out x 3, the last in step 3" in caplog.text


@pytest.mark.skipif(devices.is_lazy(HPU), reason="lazy mode refuses to compile")
def test_graphs_are_counted_in_the_step_that_compiles_them() -> None:
    torch.compiler.reset()
    telemetry = GaudiTelemetry()
    recorder = fit(telemetry, compile=True)
    (own,) = telemetry.ranks
    first = {name.removeprefix("telemetry/"): value for name, value in recorder.rows[0].items()}
    assert own.compilations == first["graph_compilations"] >= 2, "a forward and a backward at least"
    assert own.last_compiled == 1
    assert 0 < own.compile_seconds == pytest.approx(first["compile_seconds"])
    assert own.graphs == first["graphs"] >= 1
    assert own.compilations >= 2 * own.graphs, "each graph has a forward and a backward"
    fit(telemetry, compile=True)
    assert telemetry.ranks[0].steps == 4, "a second run counts from zero"


def test_without_compilation_no_graph_is_counted() -> None:
    telemetry = GaudiTelemetry()
    recorder = fit(telemetry)
    assert telemetry.ranks[0].compilations == telemetry.ranks[0].graphs == 0
    assert recorder.series("telemetry/graph_compilations") == []
    assert telemetry.ranks[0].memory[1][1] == pytest.approx(devices.peak_memory_bytes(HPU), rel=0.5)


def test_a_trace_asks_for_the_devices_activity(tmp_path: Path) -> None:
    hpu.reset_calls()
    profiler = DeviceProfiler(steps=(2, 2), dirpath=tmp_path)
    fit(profiler)
    assert hpu.calls()["profiled_hpu"] == 1, "ProfilerActivity.HPU, which only the bridge's class knows"
    assert profiler.file is not None
    names = {event.get("name", "") for event in json.loads(profiler.file.read_text())["traceEvents"]}
    assert {"step 2, batch 1", "hpu::optimizer_adamw"} <= names
    assert any(name.startswith("hpu::rms_norm") for name in names)


def test_a_profile_that_is_switched_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HABANA_PROFILE", "0")
    with pytest.raises(RuntimeError, match='To enable set "HABANA_PROFILE"'):
        devices.profiler_of(HPU)


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(record.getMessage())


def on_two_cards() -> tuple[list[FirstSteps], str, float]:
    """First steps of all ranks, what was logged, and the seconds of the whole run."""
    telemetry, lines, logger = GaudiTelemetry(), Lines(), logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(lines)
    logger.setLevel("INFO")
    begun = time.perf_counter()
    fit(telemetry, tp=2)
    logger.removeHandler(lines)
    return telemetry.ranks, "\n".join(lines.kept), time.perf_counter() - begun


def test_all_ranks_tell_their_card_and_the_seconds_of_each_groups_first_collective(
    ranks: Callable[..., list[Any]],
) -> None:
    found = ranks(2, on_two_cards)
    assert "cards of the ranks: rank 0: 0, 0; rank 1: 1, 1 (ID, HLS_MODULE_ID); " in found[0][1]
    assert "world (2 ranks): the first collective took " in found[0][1]
    whole = max(seconds for *_, seconds in found)
    for numbers, *_ in found:
        assert [rank.card for rank in numbers] == ["0", "1"]
        assert all(rank.counts for rank in numbers)
        for rank in numbers:
            assert rank.first_collectives, "no group has connected before training"
            assert all(0 < seconds < whole for seconds in rank.first_collectives.values())
        line = summary(numbers, 10)
        assert "first collectives world " in line
        assert "; cards 0,1; " in line
