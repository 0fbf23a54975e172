"""Routed experts as one operator: each token visits those of its experts that this rank holds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_megatron.ops.activation import swiglu
from lightning_megatron.ops.grouped_linear import grouped_linear
from lightning_megatron.ops.hpu_bridge import missing
from lightning_megatron.ops.implementation import Implementation, Op

Activation = Callable[[Tensor], Tensor]


def mixture_of_experts_reference(
    x: Tensor, experts: Tensor, weights: Tensor, fc1: Tensor, fc2: Tensor, activation: Activation, first: int = 0
) -> Tensor:
    """:func:`mixture_of_experts` in plain torch: one product per expert, of its tokens.

    It synchronizes with the host once, for the number of tokens of each expert.
    """
    tokens, topk = experts.shape
    local = experts.flatten() - first
    here = fc2.shape[0]
    local = torch.where((local < 0) | (local >= here), here, local)
    order = local.argsort(stable=True)
    counts = torch.zeros(here + 1, dtype=torch.int64, device=x.device)
    counts.scatter_add_(0, local, torch.ones_like(local))
    lengths = counts[:here].tolist()
    order = order[: sum(lengths)]
    sources = order // topk
    hidden = activation(grouped_linear(x.index_select(0, sources), fc1.flatten(1, -2), lengths))
    out = grouped_linear(hidden, fc2, lengths)
    weighted = (out * weights.flatten()[order].unsqueeze(-1)).to(x.dtype)
    return x.new_zeros(tokens, fc2.shape[1]).index_add(0, sources, weighted)


def mixture_of_experts(
    x: Tensor, experts: Tensor, weights: Tensor, fc1: Tensor, fc2: Tensor, activation: Activation, first: int = 0
) -> Tensor:
    """Sum over a token's experts ``first .. first + n - 1`` of ``weight x fc2(activation(fc1(x)))``.

    Args:
        x: ``[T, H]``.
        experts: ``[T, k]`` ids over all ranks; ids of other ranks' experts, or beyond all, contribute nothing.
        weights: ``[T, k]`` fp32.
        fc1: ``[n, F, H]``, or ``[n, 2, F, H]`` for a gated activation.
        fc2: ``[n, H, F]``.
        activation: function between the two layers.
        first: id of the first expert of this rank.

    Returns:
        ``[T, H]``.
    """
    out: Tensor = MIXTURE_OF_EXPERTS.on(x.device.type)(x, experts, weights, fc1, fc2, activation, first)
    return out


def fused_operator_missing() -> str | None:
    """The reason why there is no operator with gradients. Intel's has them from 1.20.1 on (argument ``recomp``)."""
    operator = getattr(torch.ops.hpu, "mixture_of_experts", None)
    if operator is None or "fused_weights" not in operator.overloads():
        return missing("core", "mark_step") or "the bridge has no such operator"
    schema = operator.fused_weights._schema
    has_gradients = any(argument.name == "recomp" for argument in schema.arguments)
    return None if has_gradients else "this version of the bridge has no gradients of it"


def _beyond_operator(
    x: Tensor, experts: Tensor, weights: Tensor, fc1: Tensor, fc2: Tensor, activation: Activation, first: int = 0
) -> str | None:
    return None if activation is swiglu else "the operator is for SwiGLU"


def mixture_of_experts_fused(
    x: Tensor, experts: Tensor, weights: Tensor, fc1: Tensor, fc2: Tensor, activation: Activation, first: int = 0
) -> Tensor:
    """:func:`mixture_of_experts` of SwiGLU experts by the Gaudi's operator; never run on a real Gaudi.

    Its eager path without gradients ignores the range of experts. So ids are made local, the range is always complete,
    and tokens of other ranks' experts go to the first expert with weight 0.
    """
    here = fc2.shape[0]
    local = experts - first
    outside = (local < 0) | (local >= here)
    out: Tensor = torch.ops.hpu.mixture_of_experts.fused_weights(
        x,
        local.masked_fill(outside, 0),
        weights.masked_fill(outside, 0.0).to(x.dtype),
        list(fc1.flatten(1, -2).unbind()),
        list(fc2.unbind()),
        permuted_weights=True,
        activation="silu",
        experts_min=0,
        experts_max=here - 1,
    )
    return out


MIXTURE_OF_EXPERTS = Op(
    "mixture_of_experts",
    (
        Implementation(
            "hpu::mixture_of_experts", "hpu", lambda: mixture_of_experts_fused, fused_operator_missing, _beyond_operator
        ),
    ),
    run=mixture_of_experts,
    reference=mixture_of_experts_reference,
)
