"""Activations of the feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu_reference(x: Tensor) -> Tensor:
    """:func:`swiglu` in plain torch."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


class _SwiGLU(torch.autograd.Function):
    """Saves only the input for backward; recomputing ``silu(gate)`` is cheaper than storing it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        d_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return torch.cat((d_gate, F.silu(gate).mul_(grad)), dim=-1)


def swiglu(x: Tensor) -> Tensor:
    """``[..., 2 F] -> [..., F]``: ``silu(gate) * up`` (https://arxiv.org/abs/2002.05202), gate in the first half."""
    out: Tensor = _SwiGLU.apply(x)
    return out


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU in GPT-2's tanh form (https://arxiv.org/abs/1606.08415)."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "relu": F.relu,
    "swiglu": swiglu,
}
