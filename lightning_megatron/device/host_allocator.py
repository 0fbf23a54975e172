"""Memory that a training step frees stays with the process.

The C library of most Linux systems (glibc) returns large blocks to the kernel as soon as they are freed, and the end of
its heap once enough is free there. The kernel must then zero the pages of activations and gradients again in each step.
glibc's public function ``mallopt`` changes this for the whole process.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

import torch

from lightning_megatron.device.kinds import CPU

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_NEVER = -1
_LARGEST = (1 << 30, 32 << 20)
"""Block sizes from which glibc uses ``mmap``; older versions refuse more than the second."""
_CHOICES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory(device: torch.device, variables: Mapping[str, str] = os.environ) -> bool:
    """Let glibc keep freed memory in a process that computes on a CPU; repeated calls do no harm.

    Args:
        device: device of the process.
        variables: environment variables of the process; if one of glibc's own for this is set, nothing changes.

    Returns:
        True if it was set.
    """
    if device.type != CPU.type or any(name in variables for name in _CHOICES):
        return False
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018 - missing from other C libraries
        mallopt = library.mallopt
    except (OSError, TypeError, AttributeError):
        return False
    return any(mallopt(_MMAP_THRESHOLD, size) for size in _LARGEST) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))
