"""Counters of a device's software, its activity for torch's profiler, and the number of the card."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch

from lightning_megatron.device.kinds import CPU, HPU


@dataclass(frozen=True)
class SoftwareCounters:
    """Counts of a device's software since this process started.

    Attributes:
        compilations: compiled graphs; Gaudi does not count the single ops of its eager mode.
        compile_seconds: time of these compilations.
        fallbacks: calls of ops that ran on the host, since the device has no kernel for them, by name of the op.
    """

    compilations: int = 0
    compile_seconds: float = 0.0
    fallbacks: Mapping[str, int] = field(default_factory=dict)

    def __sub__(self, before: SoftwareCounters) -> SoftwareCounters:
        more = {name: count - before.fallbacks.get(name, 0) for name, count in self.fallbacks.items()}
        return SoftwareCounters(
            self.compilations - before.compilations,
            self.compile_seconds - before.compile_seconds,
            {name: count for name, count in more.items() if count},
        )


def software_counters(device: torch.device) -> SoftwareCounters | None:
    """Counts so far; ``None`` where the software of the device does not count."""
    if device.type != HPU.type:
        return None
    try:
        metrics: Any = import_module("habana_frameworks.torch.hpu.metrics")
    except ImportError:
        return None
    graphs, fallbacks = (_statistics(metrics, name) for name in ("graph_compilation", "cpu_fallback"))
    return SoftwareCounters(
        int(graphs.get("TotalNumber", 0)),
        int(graphs.get("TotalTime", 0)) / 1e6,  # microseconds
        dict(fallbacks.get("FallbackOps", {})),
    )


def _statistics(metrics: Any, name: str) -> dict[str, Any]:
    metric = metrics.metric_global(name)
    return {} if metric is None else dict(metric.stats())


def profiler_of(device: torch.device) -> Any:
    """A ``torch.profiler.profile`` of the host and the device.

    Gaudi's bridge replaces torch's class, so the class is looked up only after the import of the bridge.
    """
    if device.type == HPU.type:
        import_module("habana_frameworks.torch")
    known: Any = torch.profiler.ProfilerActivity
    activities = [known.CPU] + ([] if device.type == CPU.type else [getattr(known, device.type.upper())])
    return torch.profiler.profile(activities=activities)


def card_number(device: torch.device) -> str:
    """Number of this process's card on its machine; empty if it is not known, and for a CPU.

    On Gaudi it is the module that was asked for. Without a module in the environment Gaudi's software takes any card
    that is free.
    """
    if device.type == HPU.type:
        return os.environ.get("HLS_MODULE_ID", "")
    return "" if device.index is None or device.type == CPU.type else str(device.index)
