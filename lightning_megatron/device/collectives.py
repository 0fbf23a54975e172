"""Backends of torch.distributed for a device, and their behaviour."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_megatron.device.kinds import CPU, CUDA, HPU, kind_of


@dataclass(frozen=True)
class CollectiveTraits:
    """Behaviour of a backend of collectives that its callers must know.

    Attributes:
        timeout: default limit for a collective.
        is_done_waits: True if asking whether a collective or message has finished blocks until it has.
        connects_at_first_use: True if the members of a group connect only at its first collective.
        exit_waits: True if a process that ends waits, without a limit or for long, for the other members of its groups.
        needs_equal_nodes: True if a group must have equally many ranks on every node that it touches.
        wait_blocks: True if the host blocks in the wait for a collective; otherwise only the current stream waits, and
            the host goes on until it needs a result.
        copies_pieces: True if a reduce-scatter sends as much as an all-reduce, and an all-gather copies its result once
            more. Then an all-to-all with a sum on each rank, and broadcasts in place, take less.
    """

    timeout: timedelta = timedelta(minutes=10)
    is_done_waits: bool = False
    connects_at_first_use: bool = False
    exit_waits: bool = False
    needs_equal_nodes: bool = False
    wait_blocks: bool = False
    copies_pieces: bool = False


# In a first step on Gaudi a rank may compile graphs for longer than 20 minutes while others already wait for it.
_HCCL = CollectiveTraits(timedelta(minutes=60), True, True, True, True)
_NCCL = CollectiveTraits(connects_at_first_use=True, exit_waits=True)
_GLOO = CollectiveTraits(wait_blocks=True, copies_pieces=True)

_MANY_RANKS = 64
_SPARE = timedelta(minutes=1)
_DUMPS = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
"""Variables for the files of torch's flight recorder, the second one for older torch."""


def collective_traits(device: torch.device) -> CollectiveTraits:
    """Behaviour of the collectives of a device's own backend."""
    known = {HPU.type: _HCCL, CUDA.type: _NCCL, CPU.type: _GLOO}
    return known.get(device.type, CollectiveTraits())


def connect_on_demand(num_ranks: int, variables: MutableMapping[str, str] = os.environ) -> None:
    """Let gloo connect two ranks at their first message, in a job of many ranks, unless the user has chosen.

    Otherwise each group connects all pairs, and reads n² addresses from the store of rank 0. In a small job that is
    cheap, and it has a limit in time: a late connection to a rank that has died has none in gloo (issue 520 there).
    torch reads the variable from 2.8 on; older versions connect all pairs.
    """
    if num_ranks >= _MANY_RANKS:
        variables.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def backend_timeout(device: torch.device, limit: timedelta | None) -> timedelta | None:
    """Timeout to give to a device's own backend, for a limit that this package checks itself.

    The watchdog of a backend that does not block the host aborts the process, and names no rank. So it comes later.
    """
    return limit if limit is None or collective_traits(device).wait_blocks else limit + _SPARE


def keep_flight_records(device: torch.device, folder: str) -> None:
    """Let torch's flight recorder of NCCL write to a folder, unless the user has chosen another place."""
    if device.type == CUDA.type and not any(name in os.environ for name in _DUMPS):
        os.environ.update(dict.fromkeys(_DUMPS, os.path.join(folder, "nccl-of-rank-")))


def collective_backends(device: torch.device) -> tuple[str, ...]:
    """Available backends of torch.distributed that take tensors of a device; the device's own comes first."""
    own = kind_of(device).backend
    able = (name for name, types in dist.Backend.backend_capability.items() if device.type in types)
    return own, *(name for name in able if name != own and dist.is_backend_available(name))


def barrier_device_ids(device: torch.device) -> list[int] | None:
    """``device_ids`` of ``dist.barrier``: only NCCL takes them."""
    return [device.index] if device.type == CUDA.type and device.index is not None else None


def order_launches(
    device: torch.device, *, tp: int, cp: int, ep: int, variables: MutableMapping[str, str] = os.environ
) -> None:
    """Set CUDA's launch queues and the priority of NCCL's streams by the layout, where the user has set neither.

    Call it before the process uses CUDA. With several queues, the product of a weight's gradient can occupy a Hopper
    before the reduction that was started ahead of it (https://github.com/NVIDIA/Megatron-LM/issues/533). One queue
    keeps the order of the program. Exchanges of experts run at the same time as products and need several
    (https://github.com/NVIDIA/Megatron-LM/issues/6311).
    """
    if device.type != CUDA.type or max(tp, cp, ep) == 1:
        return
    if max(tp, ep) > 1:
        variables.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32" if ep > 1 else "1")
    variables.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
