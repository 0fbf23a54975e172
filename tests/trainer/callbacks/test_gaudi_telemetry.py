"""GaudiTelemetry and DeviceProfiler on any device; ``tests/device/test_telemetry.py`` has what only a Gaudi counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch.utils.data import DataLoader

from lightning_megatron import ConfigError, DeviceProfiler, GaudiTelemetry, LlamaModule, MegatronStrategy
from lightning_megatron.device import SoftwareCounters
from lightning_megatron.lightning.monitoring.first_steps import FirstSteps, summary
from lightning_megatron.testing.trainer import Recorder, kind_in_tests, quiet_trainer
from tests.tiny import tiny_llama

Ranks = Callable[..., list[Any]]


def fit(steps: int, *callbacks: Callback, **options: Any) -> Recorder:
    seed_everything(3, verbose=False)
    recorder, strategy = Recorder(), MegatronStrategy(**options)
    trainer = quiet_trainer(
        strategy, max_steps=steps, callbacks=list(callbacks), logger=recorder, val_check_interval=4, limit_val_batches=1
    )
    tokens = torch.randint(40, (4, 9), generator=torch.Generator().manual_seed(0))
    rows = [{"tokens": row[:-1], "labels": row[1:]} for row in tokens] * max(steps, 4)
    loaders = DataLoader(rows, batch_size=4), DataLoader(rows, batch_size=4)  # type: ignore[arg-type]
    trainer.fit(LlamaModule(tiny_llama(), lr=1e-3), *loaders)
    return recorder


def gathered(steps: int, layout: dict[str, Any]) -> tuple[list[FirstSteps], Recorder]:
    telemetry = GaudiTelemetry(steps)
    recorder = fit(steps + 2, telemetry, **layout)
    recorder_rows = [row for row in recorder.rows if any(name.startswith("telemetry/") for name in row)]
    recorder.rows = recorder_rows
    return telemetry.ranks, recorder


@pytest.mark.slow
def test_memory_and_step_times_are_logged_and_gathered_from_all_ranks(ranks: Ranks) -> None:
    for numbers, recorder in ranks(2, gathered, 20, {"tp": 2}):
        assert [rank.steps for rank in numbers] == [20, 20]
        for rank in numbers:
            assert list(rank.memory) == [1, 2, 10]
            assert all(0 < used <= peak for used, peak in rank.memory.values())
            assert len(rank.step_seconds) == 2
            assert all(0 < seconds < 60 for seconds in rank.step_seconds)
        rows = {int(row["step"]): row for row in recorder.rows}
        assert {1, 2, 10, 20} <= rows.keys()
        assert rows[10]["telemetry/memory_peak_bytes"] >= rows[1]["telemetry/memory_peak_bytes"] > 0
        assert "telemetry/memory_in_use_bytes" not in rows[20]
        assert rows[20]["telemetry/step_time_ms"] > 0


def test_a_device_without_counters_is_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    telemetry = GaudiTelemetry(steps=50)
    fit(3, telemetry)
    said = [record.message for record in caplog.records if "GaudiTelemetry" in record.message]
    assert said[-1].startswith("GaudiTelemetry: steps 1 to 3; "), "a short run reports at its end"
    if kind_in_tests().type != "hpu":
        assert said[0].endswith(
            "counts no compiled graphs and no fallbacks; memory, groups and step times are reported"
        )
        assert len(said) == 2
        assert not telemetry.ranks[0].counts


def test_the_line_has_the_least_and_the_most_of_all_ranks() -> None:
    one = FirstSteps(card="4", counts=True, steps=50, graphs=2, step_seconds=[0.9, 0.02, 0.01])
    one.memory, one.first_collectives = {1: (2**30, 3 * 2**29)}, {"tp": 0.25}
    one.add_counters(SoftwareCounters(7, 1.5, {"aten::foo": 2}), 1)
    one.add_counters(SoftwareCounters(0, 0.0, {"aten::foo": 1, "aten::bar.out": 1}), 12)
    two = FirstSteps(card="5", counts=True, steps=50, graphs=3, graph_breaks=1)
    two.memory, two.first_collectives = {1: (2**29, 2**31)}, {"tp": 1.0, "pp": 2.0}
    two.add_counters(SoftwareCounters(9, 2.0), 3)
    assert summary([one, two], 10) == (
        "steps 1 to 50; graphs compiled 7 to 9, in at most 2.0 s, the last in step 3; "
        "CPU fallbacks aten::bar.out x 1, aten::foo x 3, the last in step 12; "
        "torch.compile: graphs 2 to 3, breaks 0 to 1; GiB in use / peak after step 1: 1.00 / 2.00; "
        "first collectives tp 1.00 s, pp 2.00 s; cards 4,5; "
        "step time 10.0 ms, 20.0 ms in the 10 steps before: still falling"
    )
    one.step_seconds[-1] = 0.0199
    assert summary([one], 10).endswith("step time 19.9 ms, 20.0 ms in the 10 steps before: steady")
    assert summary([FirstSteps(counts=True, steps=4)], 10) == (
        "steps 1 to 4; no graph compiled; no CPU fallback; no trend of the step time: it takes 20 steps"
    )


def traced(folder: Path, layout: dict[str, Any]) -> Path | None:
    profiler = DeviceProfiler(steps=(2, 3), dirpath=folder)
    fit(4, profiler, **layout)
    return profiler.file


def test_each_rank_writes_a_trace_of_its_steps(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, traced, tmp_path, {"tp": 2}) == [tmp_path / f"rank{n}-steps2-3.pt.trace.json" for n in (0, 1)]
    assert len(list(tmp_path.iterdir())) == 2, "no unfinished file is left"
    for file in tmp_path.iterdir():
        names = [event.get("name", "") for event in json.loads(file.read_text())["traceEvents"]]
        steps = sorted({name for name in names if name.startswith("step ")})
        assert steps == ["step 2, batch 1", "step 3, batch 2"]
        assert any(name.startswith("aten::") and "mm" in name for name in names)
        assert sum("optimizer" in name.lower() for name in names) >= 2


def test_a_run_that_ends_early_writes_what_there_is_or_warns(tmp_path: Path) -> None:
    profiler = DeviceProfiler(steps=(2, 30), dirpath=tmp_path)
    fit(3, profiler)
    assert profiler.file is not None
    assert "step 3, batch 2" in profiler.file.read_text()
    with pytest.warns(UserWarning, match=r"wrote no trace: training ended at step 2, and steps=\(5, 6\)"):
        fit(2, DeviceProfiler(steps=(5, 6), dirpath=tmp_path))


class Failing(Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        raise RuntimeError("broken")


def test_a_run_that_fails_leaves_no_profiler_running(tmp_path: Path) -> None:
    profiler = DeviceProfiler(steps=(1, 2), dirpath=tmp_path / "traces")
    with pytest.raises(RuntimeError, match="broken"):
        fit(3, Failing(), profiler)
    assert profiler.file is None
    fit(2, DeviceProfiler(steps=(1, 1), dirpath=tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["rank0-steps1-1.pt.trace.json"]


@pytest.mark.parametrize("steps", [(0, 3), (4, 3), (4,), ("a", 2)])
def test_steps_that_are_none_are_refused(steps: Any) -> None:
    with pytest.raises(ConfigError, match="steps="):
        DeviceProfiler(steps=steps)
