"""Calibration: one process on each device measures at the same time, and the results become a device file."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_megatron.device import (
    KINDS,
    DeviceKind,
    adds_products,
    best_available,
    device_count,
    kind_of,
    total_memory_bytes,
)
from lightning_megatron.errors import Problem, raise_if_any
from lightning_megatron.tools.calibration.kernels import DTYPES
from lightning_megatron.tools.planning.core.device_file import DeviceSpec, Efficiency, Link, device_names, load_device

Found = dict[str, Any]
_SHORTEST = 0.5
"""Products with a rate below this share of the best one are left out: they measure overheads."""


def calibrate(
    out: Path | str | None = None, *, kind: str | None = None, processes: int | None = None, limit: float = 1.0
) -> DeviceSpec:
    """Measure the devices of this node, and write a device file; takes about a minute.

    Args:
        out: file to write; ``None`` for none.
        kind: torch's type of device; ``None`` for the best one of this machine.
        processes: processes that measure at the same time; ``None`` for one on each device, on a CPU for one on each
            core, at most eight. Processes on a CPU share its cores evenly.
        limit: seconds that one measurement should take; there are about 25.

    Raises:
        ConfigError: for an unknown kind of device, or more processes than devices.
        RuntimeError: if a process fails, with the end of its output.
    """
    raise_if_any(_problems(kind, processes))
    chosen = best_available() if kind is None else kind_of(kind)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    on_host = chosen is KINDS["cpu"]
    count = processes or (min(cores, 8) if on_host else device_count(chosen))
    threads = max(1, cores // count) if on_host else 1
    memory = total_memory_bytes(chosen.type) // (count if on_host else 1)
    spec = device_spec(_measured(chosen.type, count, threads, limit), memory, chosen)
    if out is not None:
        spec.write(out)
    return spec


def _problems(kind: str | None, processes: int | None) -> list[Problem]:
    found = []
    if kind is not None and kind not in KINDS:
        found.append(Problem("kind", kind, "unknown kind of device", tuple(KINDS)))
    if processes is not None and processes < 1:
        found.append(Problem("processes", processes, "must be at least 1", (1,)))
    return found


def _measured(kind: str, count: int, threads: int, limit: float) -> list[Found]:
    """Results of all processes."""
    with tempfile.TemporaryDirectory(prefix="lm-calibrate-") as name:
        folder = Path(name)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        running = []
        for rank in range(count):
            given = (rank, count, kind, name, limit)
            words = [sys.executable, "-m", "lightning_megatron.tools.calibration.worker", *map(str, given)]
            with open(folder / f"{rank}.log", "wb") as log:
                running.append(subprocess.Popen(words, stdout=log, stderr=log, env=environment))
        try:
            while None in (ends := [process.poll() for process in running]) and not any(ends):
                time.sleep(0.05)  # after a failure the other processes would wait for the failed one
            failed = [rank for rank, end in enumerate(ends) if end]
        finally:
            for process in running:
                process.kill()
        if failed:
            text = (folder / f"{failed[0]}.log").read_text(errors="replace")[-600:]
            raise RuntimeError(f"process {failed[0]} of the calibration failed: {text}")
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


def device_spec(found: Sequence[Found], memory: int, kind: DeviceKind) -> DeviceSpec:
    """Device file from the results of all processes: the median of each figure.

    Args:
        found: results of ``worker.py``, one of each process.
        memory: bytes of one device.
        kind: its kind.
    """
    name = str(found[0]["name"])
    known = next((load_device(each) for each in device_names() if each.split("-")[0] in name.lower()), None)
    base = known or load_device("cpu")
    bandwidth = statistics.median(each["copy"] for each in found)
    peaks, efficiency = _peaks_and_efficiency(found, bandwidth)
    links = [each["link"] for each in found if "link" in each]
    within = Link(*map(statistics.median, zip(*links, strict=True))) if links else base.within_node
    beyond = None if kind is KINDS["cpu"] else known
    return replace(
        base,
        name="calibrated",
        title=f"{name}, measured by {len(found)} processes at once",
        memory_bytes=memory,
        flops=peaks,
        memory_bandwidth=bandwidth,
        devices_per_node=len(found),
        within_node=within,
        between_nodes=beyond.between_nodes if beyond else within,
        efficiency=efficiency,
        link_efficiency=1.0,
        kernel_seconds=statistics.median(each["kernel"] for each in found),
        asynchronous=kind is not KINDS["cpu"],
        adds_products=adds_products(kind.type),
        sources=(
            "flops: the fastest matrix product; efficiency, memory_bandwidth, kernel_seconds: measured",
            "within_node: all-gather and reduce-scatter, measured" if links else f"within_node: as of {base.name}",
            f"between_nodes: as of {beyond.name}" if beyond else "between_nodes: as within_node",
            f"step_seconds, workspace_bytes: as of {base.name}",
        ),
    )


def _peaks_and_efficiency(found: Sequence[Found], bandwidth: float) -> tuple[dict[str, float], dict[str, Efficiency]]:
    """Peak FLOP/s and fitted constants by number format."""
    peaks, efficiency = {}, {}
    for dtype in DTYPES:
        rates = [_products(each[dtype]["matmul"], bandwidth) for each in found]
        peaks[dtype] = statistics.median(map(max, rates))
        efficiency[dtype] = Efficiency(
            statistics.median(statistics.median(_large(rate)) for rate in rates) / peaks[dtype],
            statistics.median(each[dtype]["attention"] for each in found) / peaks[dtype],
            statistics.median(each[dtype]["elementwise"] for each in found) / bandwidth,
        )
    return peaks, efficiency


def _products(measured: Sequence[Sequence[float]], bandwidth: float) -> list[float]:
    """FLOP/s of products without the time of their bytes, which the formula adds separately."""
    return [flops / max(took - moved / bandwidth, took / 2) for flops, moved, took in measured]


def _large(rates: Sequence[float]) -> list[float]:
    return [rate for rate in rates if rate > _SHORTEST * max(rates)]
