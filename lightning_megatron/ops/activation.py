"""Activations of the feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.config.counts import GATED
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.device import as_result


class _SwiGLU(torch.autograd.Function):
    """Saves only the input for backward; recomputing ``silu(gate)`` is cheaper than storing it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return as_result(F.silu(gate).mul_(up))

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


class _GEGLU(torch.autograd.Function):
    """Saves only the input for backward, as :class:`_SwiGLU` does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, approximate: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.approximate = approximate
        gate, up = x.chunk(2, dim=-1)
        return as_result(F.gelu(gate, approximate=approximate).mul_(up))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        d_gate = torch.ops.aten.gelu_backward(grad * up, gate, approximate=ctx.approximate)
        return torch.cat((d_gate, F.gelu(gate, approximate=ctx.approximate).mul_(grad)), dim=-1), None


def geglu(x: Tensor, approximate: str = "none") -> Tensor:
    """``[..., 2 F] -> [..., F]``: ``gelu(gate) * up`` (https://arxiv.org/abs/2002.05202), gate in the first half."""
    out: Tensor = _GEGLU.apply(x, approximate)
    return out


def geglu_tanh(x: Tensor) -> Tensor:
    """:func:`geglu` with the GELU of :func:`gelu_tanh`."""
    return geglu(x, "tanh")


class _ClampedSwiGLU(torch.autograd.Function):
    """Saves only the input for backward, as :class:`_SwiGLU` does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: float, limit: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.alpha, ctx.limit = alpha, limit
        gate, up = _clamped(x, limit)
        return as_result((gate * alpha).sigmoid_().mul_(gate).mul_(up + 1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        gate, up = _clamped(x, ctx.limit)
        share = (gate * ctx.alpha).sigmoid_()
        slope = share * (1 + ctx.alpha * gate * (1 - share))
        d_gate, d_up = grad * (up + 1) * slope, grad * gate * share
        before_gate, before_up = x.chunk(2, dim=-1)
        d_gate = d_gate.masked_fill(before_gate > ctx.limit, 0.0)
        return torch.cat((d_gate, d_up.masked_fill(before_up.abs() > ctx.limit, 0.0)), dim=-1), None, None


def _clamped(x: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    gate, up = x.chunk(2, dim=-1)
    return gate.clamp(max=limit), up.clamp(-limit, limit)


def swiglu_clamped(x: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """``[..., 2 F] -> [..., F]``: ``gate sigmoid(alpha gate) (up + 1)``, with gate and up clamped first.

    As in gpt-oss (https://arxiv.org/abs/2508.10925, section 2.2).

    Args:
        x: gate and up side by side.
        alpha: factor of the gate inside the sigmoid.
        limit: highest gate, and largest magnitude of up.
    """
    out: Tensor = _ClampedSwiGLU.apply(x, alpha, limit)
    return out


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU in GPT-2's tanh form (https://arxiv.org/abs/1606.08415)."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "relu": F.relu,
    "swiglu": swiglu,
    "geglu": geglu,
    "geglu_tanh": geglu_tanh,
    "swiglu_clamped": swiglu_clamped,
}


class Activation(NamedTuple):
    """Function between the two matrices of a feed-forward layer.

    Attributes:
        run: function ``[..., parts F] -> [..., F]``.
        parts: matrices side by side in the first layer: 2 for gate and up.
    """

    run: Callable[[Tensor], Tensor]
    parts: int


def activation(name: str) -> Activation:
    """The activation of that name, with its usual constants."""
    return Activation(ACTIVATIONS[name], 2 if name in GATED else 1)


def activation_of(config: TransformerConfig) -> Activation:
    """The activation of a model."""
    found = activation(config.activation)
    if found.run is swiglu_clamped:
        return found._replace(run=partial(swiglu_clamped, alpha=config.swiglu_alpha, limit=config.swiglu_limit))
    return found
