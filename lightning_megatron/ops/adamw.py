"""AdamW (https://arxiv.org/abs/1711.05101) over parameters of any shape."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.optim import AdamW, Optimizer

from lightning_megatron.ops.hpu_bridge import bridge, requires
from lightning_megatron.ops.implementation import Implementation, Op

Groups = Iterable[Any]


def adamw_reference(params: Groups, *, lr: float, betas: tuple[float, float], eps: float) -> Optimizer:
    """torch's AdamW in its default implementation; ``weight_decay`` is in the groups."""
    return AdamW(params, lr=lr, betas=betas, eps=eps)


def adamw_torch(params: Groups, *, lr: float, betas: tuple[float, float], eps: float) -> Optimizer:
    """torch's AdamW in one kernel."""
    return AdamW(params, lr=lr, betas=betas, eps=eps, fused=True)


def adamw_hpu(
    optimizer: type[Optimizer], params: Groups, *, lr: float, betas: tuple[float, float], eps: float
) -> Optimizer:
    """Intel's ``FusedAdamW``; never run on a real Gaudi.

    It adds ``eps`` to the root of the second moment before its bias correction; torch adds it after. It counts steps in
    the group. With bf16 parameters its weight decay is lost: ``1 - lr x decay`` rounds to 1.
    """
    return optimizer(params, lr=lr, betas=betas, eps=eps)  # type: ignore[call-arg]


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
ADAMW = Op(
    "adamw",
    (
        Implementation("torch's fused AdamW", "cpu", lambda: adamw_torch),
        Implementation("torch's fused AdamW", "cuda", lambda: adamw_torch),
        Implementation("FusedAdamW", "hpu", lambda: partial(adamw_hpu, bridge(*_FUSED_ADAMW)), requires(*_FUSED_ADAMW)),
    ),
    run=adamw_reference,
    reference=adamw_reference,
)
"""Its functions construct an optimizer, which computes the updates; this is the only op with state."""
