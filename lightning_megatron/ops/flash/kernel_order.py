"""Kernels of torch's attention on CUDA: which of them may take a call, and in which order torch asks them."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

HOPPER = (9, 0)
"""Capability of cards on which cuDNN's attention is the fastest."""

_HAS_ORDER = "set_priority" in inspect.signature(sdpa_kernel).parameters
_GRAPHS_HAVE_ORDER = torch.__version__ >= "2.13"  # the oldest that was seen to
_IN_ORDER = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")


def capability(device_type: str) -> tuple[int, int] | None:
    """Capability of this process's card; ``None`` for another type of device."""
    return torch.cuda.get_device_capability() if device_type == "cuda" and torch.cuda.is_available() else None


@torch.compiler.assume_constant_result  # a graph is made for one card, and for the switches of that moment
def _names(device_type: str, is_left_out: bool, has_order: bool) -> tuple[str, ...]:
    """Kernels in the order in which torch should ask them; empty for torch's own choice."""
    cuda, found = torch.backends.cuda, capability(device_type)
    if found is None or not cuda.cudnn_sdp_enabled() or not (is_left_out or (has_order and found == HOPPER)):
        return ()
    enabled = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()
    return tuple(name for name, is_on in zip(_IN_ORDER, (not is_left_out, *enabled), strict=True) if is_on)


def kernels_for(device_type: str, *, masked: bool = False, varied: bool = False) -> AbstractContextManager[Any]:
    """Context in which torch chooses a kernel for attention; only CUDA has several.

    cuDNN's kernel is left out with a mask, since its backward can give NaN
    (https://github.com/pytorch/pytorch/issues/196678); where deterministic algorithms are asked for, also only with
    warnings, since its backward is not deterministic; and for shapes that vary, since it makes a plan for each.
    Elsewhere it comes first on a Hopper card, whatever order the release of torch has. A kernel that the user has
    switched off stays off.

    Args:
        device_type: type of the tensors' device.
        masked: True if the call has a mask or a bias.
        varied: True if sequences have other lengths in each batch.
    """
    is_left_out = masked or varied or torch.are_deterministic_algorithms_enabled()
    has_order = _GRAPHS_HAVE_ORDER if torch.compiler.is_compiling() else _HAS_ORDER
    kernels = [getattr(SDPBackend, name) for name in _names(device_type, is_left_out, has_order)]
    if not kernels:
        return nullcontext()
    return sdpa_kernel(kernels) if is_left_out else sdpa_kernel(kernels, set_priority=True)


def order_in_words(device_type: str | None) -> str:
    """Kernels that torch asks for attention without a mask, for the op report; empty for torch's own choice."""
    left_out = torch.are_deterministic_algorithms_enabled()
    names = _names(device_type or "", left_out, _HAS_ORDER)
    if not names:
        return ""
    return f"{'one of' if left_out else 'the first possible of'} {', '.join(names)}"
