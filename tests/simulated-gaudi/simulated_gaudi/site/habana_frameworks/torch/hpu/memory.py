"""Statistics of the device's memory: real counts of allocated bytes, with the limit of a real device."""

from __future__ import annotations

from typing import Any

from simulated_hpu.native_extension import native
from simulated_hpu.settings import settings

from habana_frameworks.torch import hpu


def memory_stats(device: Any = None) -> dict[str, int]:
    """Bytes and counts under the bridge's keys, not torch.cuda's."""
    hpu.init()
    in_use, peak, allocations, frees, largest = native().memory_counts()
    return {
        "Limit": settings().product.hbm_bytes,
        "InUse": in_use,
        "MaxInUse": peak,
        "NumAllocs": allocations,
        "NumFrees": frees,
        "ActiveAllocs": allocations - frees,
        "MaxAllocSize": largest,
        "TotalSystemAllocs": allocations,
        "TotalSystemFrees": frees,
        "TotalActiveAllocs": allocations - frees,
    }


def memory_allocated(device: Any = None) -> int:
    """Bytes that tensors hold."""
    return memory_stats()["InUse"]


def max_memory_allocated(device: Any = None) -> int:
    """Most bytes that tensors have held at once."""
    return memory_stats()["MaxInUse"]


def memory_reserved(device: Any = None) -> int:
    """Bytes of the whole pool."""
    return memory_stats()["Limit"]


max_memory_reserved = memory_reserved


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Bytes that are free, and all bytes."""
    limit = settings().product.hbm_bytes
    return limit - memory_allocated(), limit


def reset_peak_memory_stats(device: Any = None) -> None:
    """Reset the peak to the bytes that are allocated now."""
    hpu.init()
    native().reset_peak()


def reset_accumulated_memory_stats(device: Any = None) -> None:
    """Restart the counts from the bytes that are allocated now."""
    hpu.init()
    native().reset_counts()


def memory_summary(device: Any = None) -> str:
    """The statistics as lines."""
    return "\n".join(f"{name:>18}: {value}" for name, value in memory_stats().items())
