"""AdamW (https://arxiv.org/abs/1711.05101) over parameters of any shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim import Adam, AdamW, Optimizer

from lightning_megatron.device.hpu_bridge import bridge, requires
from lightning_megatron.ops.implementation import Implementation, Op

Groups = Iterable[Any]
MakeAdamW = Callable[..., Optimizer]
"""Constructor of an optimizer; its arguments are those of :func:`adamw_reference`."""


def adamw_reference(params: Groups, *, lr: float, betas: tuple[float, float], eps: float) -> Optimizer:
    """torch's AdamW in its default implementation; ``weight_decay`` is in the groups."""
    return AdamW(params, lr=lr, betas=betas, eps=eps)


def adamw_torch(params: Groups, *, lr: float, betas: tuple[float, float], eps: float) -> Optimizer:
    """torch's AdamW in one kernel."""
    return AdamW(params, lr=lr, betas=betas, eps=eps, fused=True)


_OPEN = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}
_EXACT = (torch.float32, torch.float64)


def leaves_kernel_open(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """True if torch would update a group on a CPU operation by operation, because the user has not chosen a kernel.

    The fused kernel makes one pass over memory instead of about ten, and saves two temporaries of the parameters' size.
    Its values differ by roundings; for 16-bit parameters they differ by more, so the result is False for those.

    Args:
        optimizer: optimizer; torch's own classes have the kernel.
        group: group of its ``param_groups``.
    """
    if type(optimizer) not in (Adam, AdamW) or isinstance(group["lr"], torch.Tensor):
        return False
    if any(group.get(name, default) != default for name, default in _OPEN.items()):
        return False
    return all(param.is_cpu and param.dtype in _EXACT for param in group["params"])


def beyond_fused_adamw(dtype: torch.dtype, device: str) -> str | None:
    """The reason why the device's own AdamW cannot update values of ``dtype``; ``None`` if it can."""
    if device != "hpu" or dtype == torch.float32:
        return None
    return f"its weight decay is lost where the optimizer's values are {dtype}"


def is_fused_adamw(optimizer: object) -> bool:
    """True if this is Intel's optimizer, recognized by its name, so that the bridge is not imported."""
    return any((c.__module__.split(".")[0], c.__name__) == _INTELS for c in type(optimizer).__mro__)


_INTELS = ("habana_frameworks", "FusedAdamW")
_FUSED_ADAMW = "hpex.optimizers", "FusedAdamW"
ADAMW: Op[MakeAdamW] = Op(
    "adamw",
    (
        Implementation("torch's fused AdamW", "cpu", lambda: adamw_torch),
        Implementation("torch's fused AdamW", "cuda", lambda: adamw_torch),
        # Never run on a real Gaudi. It adds ``eps`` to the root of the second moment before its bias correction; torch
        # adds it after. It counts steps in the group. With bf16 parameters its weight decay is lost: ``1 - lr x decay``
        # rounds to 1.
        Implementation("FusedAdamW", "hpu", lambda: bridge(*_FUSED_ADAMW), requires(*_FUSED_ADAMW)),
    ),
    reference=adamw_reference,
)
"""Constructors by device. They are no functions of tensors: an optimizer has state."""
