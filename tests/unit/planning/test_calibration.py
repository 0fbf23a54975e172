"""A calibration: the device file made of what processes found, and two processes that measure this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.device import KINDS
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.presets import preset
from lightning_megatron.tools.calibration.processes import calibrate, device_spec
from lightning_megatron.tools.planning.core.device_file import load_device, read_device
from lightning_megatron.tools.planning.core.job import PlannedJob
from lightning_megatron.tools.planning.time.step import time_of


def found(rate: float, name: str = "CPU", speed: float = 1.0) -> dict[str, Any]:
    """Results of a process on a device of ``rate`` FLOP/s whose memory moves 1e10 bytes a second."""
    shapes = [(6e9, 1e7), (6e10, 4e7), (6e11, 2e8)]
    matmul = [(flops, moved, flops / rate / speed + moved / 1e10) for flops, moved in shapes]
    each = {"matmul": matmul, "attention": rate / 4, "elementwise": 8e9}
    return {"name": name, "copy": 1e10, "kernel": 1e-5, "fp32": each, "bf16": each, "link": [2e9, 1e-4]}


def test_constants_of_a_machine_that_keeps_to_the_formula() -> None:
    device = device_spec([found(1e12), found(1e12)], 1 << 34, KINDS["cpu"])
    assert device.peak("fp32") == pytest.approx(1e12)
    assert device.constants("fp32").matmul == pytest.approx(1.0)
    assert device.constants("bf16").attention == pytest.approx(0.25)
    assert device.constants("bf16").memory == pytest.approx(0.8)
    assert device.within_node.bandwidth == 2e9
    assert device.between_nodes == device.within_node
    assert device.devices_per_node == 2
    assert not device.asynchronous


def test_a_figure_is_the_median_of_the_processes() -> None:
    device = device_spec([found(1e12), found(1e12, speed=0.9), found(1e12, speed=0.2)], 1 << 34, KINDS["cpu"])
    assert device.peak("fp32") == pytest.approx(0.9e12)


def test_a_known_device_keeps_what_one_node_cannot_measure() -> None:
    device = device_spec([found(6e14, "NVIDIA H100 80GB HBM3")], 80 << 30, KINDS["cuda"])
    known = load_device("h100")
    assert device.between_nodes == known.between_nodes
    assert device.workspace_bytes == known.workspace_bytes
    assert device.asynchronous


def test_unknown_kinds_and_numbers_are_refused_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        calibrate(kind="abacus", processes=0)
    assert [problem.argument for problem in caught.value.problems] == ["kind", "processes"]


def test_the_processes_beside_one_that_fails_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for it, without a limit where Gaudi's software does."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n[ $3 = 1 ] && echo no luck && exit 4\nexec sleep 30\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(RuntimeError, match="process 1 of the calibration failed: no luck"):
        calibrate(kind="cpu", processes=2)


@pytest.mark.exhaustive
def test_two_processes_measure_this_machine(tmp_path) -> None:
    """The file that they write is read, and times a job."""
    path = tmp_path / "here.json"
    device = calibrate(path, kind="cpu", processes=2, limit=0.0)
    assert read_device(path) == device
    assert device.devices_per_node == 2
    assert all(rate > 1e6 for rate in (*device.flops.values(), device.memory_bandwidth, device.within_node.bandwidth))
    job = PlannedJob(preset("llama-tiny"), ParallelLayout(tp=2).resolve(2), 128, 1, 1, precision="32-true")
    causes = time_of(job, device).by_cause
    assert causes["compute"] > 0
    assert causes["tp"] > 0
