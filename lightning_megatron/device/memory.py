"""Memory of a device: its counters, and copies to the host."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_megatron.device.kinds import CPU, CUDA, HPU

_CACHE_OF_A_CORE = 2 << 20
"""Approximate second- and third-level cache of one core of a server."""

_ALIGNMENT = 64
"""Bytes of which the first one of each tensor in a larger piece of memory is a multiple: a cache line."""

_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Dtypes that numpy knows, too, by the bytes of an element."""


def memory_statistics(device: torch.device) -> dict[str, int]:
    """Counters of the device's allocator, under the device's own names; empty for a CPU."""
    if device.type == CPU.type:
        return {}
    return dict(torch.get_device_module(device).memory_stats(device))


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this process: allocated on the device, or resident on the host for a CPU."""
    if device.type == CPU.type:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(torch.get_device_module(device).max_memory_allocated(device))


def memory_in_use_bytes(device: torch.device) -> int:
    """Memory of this process now: allocated on the device, or resident on the host for a CPU."""
    if device.type == CPU.type:
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
        except OSError:  # not Linux
            return peak_memory_bytes(device)
        return min(pages * os.sysconf("SC_PAGE_SIZE"), peak_memory_bytes(device))  # the kernel notes the peak late
    return int(torch.get_device_module(device).memory_allocated(device))


def memory_beside_tensors(device: torch.device) -> int | None:
    """Memory in use of a device that torch has not reserved: its libraries', and other processes'; CUDA alone tells."""
    if device.type != CUDA.type:
        return None
    module: Any = torch.get_device_module(device)
    free, total = module.mem_get_info(device)
    return int(total - free - module.memory_reserved(device))


def total_memory_bytes(kind: str) -> int:
    """Memory of the first device of a kind; for a CPU, that of the host."""
    if kind == CPU.type:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(torch.get_device_module(kind).mem_get_info(0)[1])


def memory_of_device(device: torch.device, *, is_taken: bool) -> int | None:
    """Memory of a device; ``None`` for a CPU, whose processes share it.

    Args:
        is_taken: True if this process has taken its card. Querying a Gaudi takes it, so one not taken is not asked.
    """
    if device.type == CPU.type or (device.type == HPU.type and not is_taken):
        return None
    module: Any = torch.get_device_module(device)
    if device.type == HPU.type:
        return int(module.memory_stats(device)["Limit"])
    return int(module.get_device_properties(device).total_memory)


def free_memory_bytes(device: torch.device) -> int | None:
    """Memory of a device that no process has taken; ``None`` for a CPU."""
    return None if device.type == CPU.type else int(torch.get_device_module(device).mem_get_info(device)[0])


_OUT_OF_MEMORY = "MODULE:PT_DEVMEM Allocation failed"
"""Words of Gaudi's bridge, in a plain RuntimeError."""


def is_out_of_memory(error: BaseException) -> bool:
    """True if a device had too little memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY in str(error)


def cache_bytes(device: torch.device) -> int | None:
    """Bytes that stay in the processor's caches between two passes; ``None`` where kernels should be large."""
    return torch.get_num_threads() * _CACHE_OF_A_CORE if device.type == CPU.type else None


def host_memory(like: torch.Tensor) -> torch.Tensor:
    """Host memory of a tensor's shape and dtype; page-locked for accelerators, which copy faster into it.

    Only for copies to the host: Gaudi's software queues copies of batches to the device if their memory is pageable,
    and waits for its queues if it is page-locked.
    """
    return _host_memory(tuple(like.shape), like.dtype, like.device)


def host_memories(likes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """:func:`host_memory` of many tensors of one device: views of few pieces of page-locked memory."""
    found = [torch.empty(0)] * len(likes)
    for piece in pieces_of([like.nbytes for like in likes]):
        last, start = piece[-1]
        memory = _host_memory((start + likes[last].nbytes,), torch.uint8, likes[last].device)
        for number, start in piece:
            like = likes[number]
            found[number] = memory[start : start + like.nbytes].view(like.dtype).view(like.shape)
    return found


def pieces_of(sizes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Pieces of memory for tensors of these sizes in bytes: for each the tensors in it, with their first bytes.

    torch rounds each piece of page-locked memory up to a power of two: a tensor of 129 MiB by itself takes 256 MiB.
    So a piece is filled up to the largest power of two that there is enough for, and the rest goes into the next one.
    """
    waiting, pieces = sorted(range(len(sizes)), key=lambda number: -sizes[number]), []
    while waiting:
        needed = sum(_aligned(sizes[number]) for number in waiting)
        limit, place, piece = max(1 << needed.bit_length() >> 1, _aligned(sizes[waiting[0]])), 0, []
        for number in waiting:
            if place + _aligned(sizes[number]) <= limit:
                piece.append((number, place))
                place += _aligned(sizes[number])
        taken = {number for number, _ in piece}
        waiting = [number for number in waiting if number not in taken]
        pieces.append(piece)
    return pieces


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _host_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    memory = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=device.type == CUDA.type)
    if device.type != HPU.type:
        return memory
    with warnings.catch_warnings():  # new torch deprecates the name; old torch needs it, else it takes CUDA
        warnings.simplefilter("ignore", DeprecationWarning)
        return memory.pin_memory(HPU.type)


def copy_to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy of a tensor of the host on a device. The host does not wait for CUDA's queue."""
    if device.type != CUDA.type:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def copy_to_host(source: torch.Tensor, memory: torch.Tensor) -> None:
    """Start a copy into :func:`host_memory`; it is complete after :func:`synchronize`."""
    memory.copy_(source, non_blocking=source.device.type != CPU.type)


def copy_alone(source: torch.Tensor, memory: torch.Tensor) -> None:
    """Copy within host memory on the calling thread alone; torch's copy would start further threads.

    Args:
        source: tensor in host memory.
        memory: tensor of the same shape and dtype in host memory.
    """
    numbers = _NUMBERS.get(source.element_size())
    if numbers is None:
        memory.copy_(source)
    else:
        memory.view(numbers).numpy()[...] = source.detach().view(numbers).numpy()


def begin_read(numbers: torch.Tensor) -> Callable[[], list[Any]]:
    """Start a copy of numbers to the host. The returned function waits for them, but not for work submitted later.

    Args:
        numbers: ``[n]``, int32 or floats; a Gaudi stores int64 as int32, so copying int64 would block the host.
    """
    if numbers.device.type == CPU.type:
        found: list[Any] = numbers.tolist()
        return lambda: found
    memory = host_memory(numbers)
    memory.copy_(numbers, non_blocking=True)
    event = torch.get_device_module(numbers.device).Event()
    event.record()

    def read() -> list[Any]:
        event.synchronize()
        return list(memory.tolist())

    return read
