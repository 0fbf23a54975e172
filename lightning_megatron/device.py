"""Kinds of device: availability, collectives backend, streams, memory and RNG. No other file names a kind of device.

Environment variables about devices are read and set only here.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class DeviceKind:
    """Properties of a kind of device.

    Attributes:
        type: torch's device type.
        backend: torch.distributed backend for tensors of this device.
        supports_fp16_training: True if fp16 training with a loss scale is possible.
        supports_double: True if there is fp64 arithmetic.
        supports_sync_batchnorm: True if torch's ``SyncBatchNorm`` works.
        peak_bf16_flops: matmul FLOP/s of one device by (part of) its marketing name, for MFU; vendor data sheets.
    """

    type: str
    backend: str
    supports_fp16_training: bool
    supports_double: bool
    supports_sync_batchnorm: bool
    peak_bf16_flops: Mapping[str, float]


CPU = DeviceKind("cpu", "gloo", False, True, False, {})
CUDA = DeviceKind(
    "cuda",
    "nccl",
    True,
    True,
    True,
    {"A100": 312e12, "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "L40S": 362e12},
)
HPU = DeviceKind("hpu", "hccl", True, False, False, {"GAUDI2": 432e12, "GAUDI3": 1835e12})

KINDS = {kind.type: kind for kind in (CPU, CUDA, HPU)}


def kind_of(device: torch.device | str) -> DeviceKind:
    """The :class:`DeviceKind` of a torch device.

    Raises:
        ValueError: if this package does not support the device type.
    """
    name = torch.device(device).type
    if name not in KINDS:
        raise ValueError(f"device type {name!r} is not supported; supported: {', '.join(KINDS)}")
    return KINDS[name]


@lru_cache(maxsize=1)
def hpu_available() -> bool:
    """True if Gaudi's bridge is installed and sees a device (the bridge is imported by this call, not earlier)."""
    if importlib.util.find_spec("habana_frameworks") is None:
        return False
    try:
        import habana_frameworks.torch.hpu as hpu
    except ImportError:
        return False
    return bool(hpu.is_available())


def why_no_hpu() -> str:
    """Reason why no Gaudi is available, in words."""
    if importlib.util.find_spec("habana_frameworks") is None:
        return "Gaudi's bridge (habana_frameworks, of habana-torch-plugin) is not installed; its containers have it"
    return "Gaudi's bridge is installed, but sees no card"


def best_available() -> DeviceKind:
    """Best available kind: Gaudi, CUDA, CPU. Gaudi comes first because its GPU-migration toolkit simulates CUDA."""
    if hpu_available():
        return HPU
    return CUDA if torch.cuda.is_available() else CPU


def collective_backends(device: torch.device) -> tuple[str, ...]:
    """Available backends of torch.distributed that take tensors of a device; the device's own comes first."""
    own = kind_of(device).backend
    able = (name for name, types in dist.Backend.backend_capability.items() if device.type in types)
    return own, *(name for name in able if name != own and dist.is_backend_available(name))


def take_card(device: torch.device, *, world_size: int, rank: int, local_rank: int) -> None:
    """Assign a card to this process in Gaudi's software; before the first tensor on it, and never in a parent process.

    This writes the ranks and the number of the card into the environment, which children inherit: see
    :func:`drop_card`.
    """
    if device.type == "hpu" and world_size > 1:
        from habana_frameworks.torch.distributed.hccl import initialize_distributed_hpu

        initialize_distributed_hpu(world_size=world_size, rank=rank, local_rank=local_rank)


def drop_card(device: torch.device) -> None:
    """Release the card's number from the environment, so that the processes started next take one card each."""
    if device.type == "hpu":
        os.environ.pop("HLS_MODULE_ID", None)


def enable_gpu_migration() -> None:
    """Run users' code that names "cuda" on Gaudi, by Intel's toolkit. This package does not need it."""
    importlib.import_module("habana_frameworks.torch.gpu_migration")


def worker_start_method(device: torch.device) -> str | None:
    """Start method of DataLoader workers, ``None`` for torch's default: Gaudi's software does not survive a fork."""
    return "spawn" if device.type == "hpu" else None


def compile_backend(device: torch.device) -> str:
    """``backend`` of ``torch.compile``."""
    return "hpu_backend" if device.type == "hpu" else "inductor"


def device_count(kind: DeviceKind) -> int:
    """Devices of a kind that this node has; a CPU counts as one."""
    if kind is CPU:
        return 1
    module: Any = torch.get_device_module(kind.type)
    return int(module.device_count())


def memory_statistics(device: torch.device) -> dict[str, int]:
    """Counters of the device's allocator, under the device's own names; empty for a CPU."""
    if device.type == "cpu":
        return {}
    module: Any = torch.get_device_module(device)
    return dict(module.memory_stats(device))


def device_name(device: torch.device) -> str:
    """Marketing name, such as GAUDI2."""
    if device.type == "cpu":
        return "CPU"
    module: Any = torch.get_device_module(device)
    return str(module.get_device_name(device))


def is_lazy(device: torch.device) -> bool:
    """True if ops on ``device`` are collected until a step is marked (Gaudi's legacy lazy mode)."""
    if device.type != "hpu":
        return False
    asked = os.environ.get("PT_HPU_LAZY_MODE")
    if asked is not None:
        return asked == "1"
    if importlib.util.find_spec("habana_frameworks") is None:
        return False
    internal: Any = importlib.import_module(
        "habana_frameworks.torch.utils.internal"
    )  # the default depends on the release
    return bool(internal.is_lazy())


def mark_step(device: torch.device) -> None:
    """Run the ops that Gaudi's lazy mode has collected; no effect on other devices."""
    if is_lazy(device):
        import habana_frameworks.torch.core as core

        core.mark_step()


def synchronize(device: torch.device) -> None:
    """Wait for all work submitted to ``device``."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "hpu":
        import habana_frameworks.torch.hpu as hpu

        hpu.synchronize()


def timing_event(device: torch.device) -> Any | None:
    """A timing event for a stream of ``device``; ``None`` for a CPU."""
    if device.type == "cpu":
        return None
    return torch.get_device_module(device).Event(enable_timing=True)


def host_memory(like: torch.Tensor) -> torch.Tensor:
    """Host memory of a tensor's shape and dtype; page-locked for CUDA, which copies faster into it."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.device.type == "cuda")


def copy_to_host(source: torch.Tensor, memory: torch.Tensor) -> None:
    """Start a copy into :func:`host_memory`; it is complete after :func:`synchronize`."""
    memory.copy_(source, non_blocking=source.device.type == "cuda")


def begin_read(numbers: torch.Tensor) -> Callable[[], list[int]]:
    """Start a copy of integers to the host. The returned function waits for them, but not for work submitted later."""
    if numbers.device.type == "cpu":
        found = numbers.tolist()
        return lambda: found
    memory = host_memory(numbers)
    memory.copy_(numbers, non_blocking=True)
    module: Any = torch.get_device_module(numbers.device)
    event = module.Event()
    event.record()

    def read() -> list[int]:
        event.synchronize()
        return [int(number) for number in memory]

    return read


def rng_state(device: torch.device) -> torch.Tensor:
    """State of the default generator of ``device``, a byte tensor on the host."""
    if device.type == "cpu":
        return torch.get_rng_state()
    module: Any = torch.get_device_module(device)
    return module.get_rng_state(device)


def set_rng_state(state: torch.Tensor, device: torch.device) -> None:
    """Set the default generator of ``device``."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        module: Any = torch.get_device_module(device)
        module.set_rng_state(state, device)


def seeded_rng_state(seed: int, device: torch.device) -> torch.Tensor:
    """State of a generator of ``device`` after seeding; generators in use do not change."""
    if device.type in ("cpu", "cuda"):
        return torch.Generator(device).manual_seed(seed).get_state()
    # Gaudi has no generator objects, and torch.manual_seed would reseed the host as well.
    module: Any = torch.get_device_module(device)
    before = module.get_rng_state(device)
    module.manual_seed(seed)
    state: torch.Tensor = module.get_rng_state(device)
    module.set_rng_state(before, device)
    return state


def peak_flops(device: torch.device) -> float | None:
    """bf16 matmul FLOP/s of one device according to its vendor, ``None`` if unknown."""
    kind = kind_of(device)
    if kind is CPU:
        return None
    name = device_name(device).upper()
    known = sorted(kind.peak_bf16_flops.items(), key=lambda item: -len(item[0]))
    return next((flops for part, flops in known if part.upper() in name), None)


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this process: allocated on the device, or resident on the host for a CPU."""
    if device.type == "cpu":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    module: Any = torch.get_device_module(device)
    return int(module.max_memory_allocated(device))


def barrier_device_ids(device: torch.device) -> list[int] | None:
    """``device_ids`` of ``dist.barrier``: only NCCL takes them."""
    return [device.index] if device.type == "cuda" and device.index is not None else None


_BF16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "avx10_1", "avx10_2", "bf16")


def has_bf16_arithmetic(device: torch.device, capabilities: Mapping[str, Any] | None = None) -> bool:
    """True if ``device`` multiplies bf16 natively, without converting every element to fp32.

    Assumed for devices other than CPUs, and for CPUs whose capabilities torch does not report.

    Args:
        device: device of the product.
        capabilities: capabilities of the CPU, named as in ``torch.cpu.get_capabilities()``; ``None`` asks torch.
    """
    if device.type != "cpu":
        return True
    ask = getattr(torch.cpu, "get_capabilities", dict)  # absent in the oldest supported torch
    known: Mapping[str, Any] = ask() if capabilities is None else capabilities
    answers = [bool(known[name]) for name in _BF16_INSTRUCTIONS if name in known]
    return any(answers) or not answers
