"""The ``hccl`` backend: a process group of gloo behind HCCL's rules."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from simulated_hpu.native_extension import native
from simulated_hpu.settings import settings


def create(options: Any, _: Any) -> Any:
    """What ``Backend.register_backend`` calls for each new group.

    Args:
        options: store, rank, size and timeout, as torch hands them to backends of the extended kind.
    """
    store = dist.PrefixStore("hccl", options.store)  # type: ignore[attr-defined]
    gloo = dist.ProcessGroupGloo(store, options.group_rank, options.group_size, options.timeout)
    return native().make_hccl(gloo, store, not settings().is_old)


def register() -> None:
    """Make ``hccl`` known to torch.distributed, for tensors on HPUs."""
    dist.Backend.register_backend("hccl", create, extended_api=True, devices=["hpu"])


def leave(group: Any, name: str, seconds: float) -> None:
    """Wait until all members of a group destroy it.

    Args:
        group: a process group.
        name: how it is called, for the error.
        seconds: how long the others may take.

    Raises:
        RuntimeError: if they do not.
    """
    device = torch.device("hpu")
    if device in group._device_types:
        native().leave(group._get_backend(device), name, seconds)
