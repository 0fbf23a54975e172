"""``torch.hpu``: the device, its memory, random numbers, streams and autocast."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from simulated_hpu.settings import settings
from torch.utils.checkpoint import DefaultDeviceType

from habana_frameworks.torch.hpu.graphs import ModuleCacher, wrap_in_hpu_graph
from habana_frameworks.torch.hpu.memory import (
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_stats,
    memory_summary,
    reset_accumulated_memory_stats,
    reset_peak_memory_stats,
)
from habana_frameworks.torch.hpu.metrics import metric_global
from habana_frameworks.torch.hpu.random import (
    default_generators,
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from habana_frameworks.torch.hpu.streams import (
    Event,
    Stream,
    current_stream,
    default_stream,
    record_stream,
    set_stream,
    stream,
)

__all__ = [
    "Event",
    "ModuleCacher",
    "Stream",
    "current_device",
    "current_stream",
    "default_generators",
    "default_stream",
    "device",
    "device_count",
    "device_of",
    "enable_recompute_sdp",
    "get_autocast_hpu_dtype",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "get_rng_state_all",
    "init",
    "initial_seed",
    "is_autocast_hpu_enabled",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "memory_summary",
    "metric_global",
    "recompute_sdp_enabled",
    "record_stream",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
    "sdp_kernel",
    "seed",
    "seed_all",
    "set_autocast_hpu_dtype",
    "set_autocast_hpu_enabled",
    "set_device",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
    "wrap_in_hpu_graph",
]

_Device = int | str | torch.device
_initialized = False  # torch's activation checkpointing saves the generator's state only if the device has this


def is_available() -> bool:
    """True if the machine has an HPU."""
    return device_count() > 0


def device_count() -> int:
    """HPUs of the machine; the process uses one."""
    return settings().devices


def init() -> None:
    """Acquire the device; most functions of this module do it by themselves."""
    _lazy_init()


def is_initialized() -> bool:
    """True if the device is acquired: a function of this module has done it, or torch by :func:`_lazy_init`."""
    return _initialized


def _lazy_init() -> None:
    global _initialized
    _initialized = True
    DefaultDeviceType.set_device_type("hpu")


def _is_in_bad_fork() -> bool:
    """Always False; torch asks before it restores tensors."""
    return False


def current_device() -> int:
    """Always 0."""
    _lazy_init()
    return 0


def set_device(device: _Device) -> None:
    """Choose a card by its place in ``HABANA_VISIBLE_MODULES``, unless one is chosen; it always has the index 0."""
    index = device if isinstance(device, int) else torch.device(device).index or 0
    modules = [int(number) for number in os.environ.get("HABANA_VISIBLE_MODULES", "0,1,2,3,4,5,6,7").split(",")]
    if index not in modules and index > len(modules):
        raise AssertionError(f"Trying to open device with idx={index} when only {modules} are avaliable)")
    if "HABANA_VISIBLE_MODULES" in os.environ or device_count() >= 8:
        os.environ.setdefault("HLS_MODULE_ID", str(modules[index]))


class device:  # noqa: N801 - as in torch.cuda
    """Context in which a device is current: there is one."""

    def __init__(self, idx: Any) -> None:
        self.idx = idx

    def __enter__(self) -> device:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class device_of(device):  # noqa: N801
    """Context in which the device of a tensor is current."""


def _exchange_device(index: int) -> int:
    """Used by ``torch.device`` as a context."""
    return 0


_maybe_exchange_device = _exchange_device


def get_device_name(device: _Device | None = None) -> str:
    """The product."""
    _lazy_init()
    return settings().device_name


def get_device_capability(device: _Device | None = None) -> str:
    """Version of the software."""
    _lazy_init()
    return settings().profile


def get_device_properties(device: _Device) -> str:
    """Description of the device."""
    return f"(simulated {get_device_name()}, software {settings().profile})"


def is_bf16_supported() -> bool:
    """Always True."""
    return True


def synchronize() -> None:
    """Wait for the device; it takes no argument, unlike ``torch.cuda.synchronize``."""
    _lazy_init()


_recompute_sdp = {"enabled": False}


def enable_recompute_sdp(enabled: bool) -> None:
    """Set whether FusedSDPA recomputes its probabilities in backward, for calls without ``recompute_mode``."""
    _recompute_sdp["enabled"] = enabled


def recompute_sdp_enabled() -> bool:
    """The default set by :func:`enable_recompute_sdp`."""
    return _recompute_sdp["enabled"]


@contextmanager
def sdp_kernel(enable_recompute: bool = True) -> Iterator[None]:
    """Context with another default of :func:`enable_recompute_sdp`."""
    before = recompute_sdp_enabled()
    enable_recompute_sdp(enable_recompute)
    try:
        yield
    finally:
        enable_recompute_sdp(before)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Dtypes that ``torch.autocast("hpu")`` may cast to."""
    return [torch.bfloat16, torch.float16]


def is_autocast_hpu_enabled() -> bool:
    """True if autocast is enabled for the device."""
    return torch.is_autocast_enabled("hpu")


def set_autocast_hpu_enabled(enabled: bool) -> None:
    """Enable or disable autocast for the device."""
    torch.set_autocast_enabled("hpu", enabled)


def get_autocast_hpu_dtype() -> torch.dtype:
    """Dtype that autocast casts to."""
    return torch.get_autocast_dtype("hpu")


def set_autocast_hpu_dtype(dtype: torch.dtype) -> None:
    """Set the dtype that autocast casts to."""
    torch.set_autocast_dtype("hpu", dtype)
