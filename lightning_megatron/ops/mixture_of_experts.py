"""Routed experts as one operator: each token visits those of its experts that this rank holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_megatron.device.hpu_bridge import missing
from lightning_megatron.ops.activation import swiglu
from lightning_megatron.ops.grouped_linear import add_group_bias, grouped_linear
from lightning_megatron.ops.implementation import Implementation, Op

Activation = Callable[[Tensor], Tensor]


class ExpertBiases(NamedTuple):
    """Biases of the experts of a rank.

    Attributes:
        fc1: ``[n, F]``, or ``[n, 2 F]`` for a gated activation.
        fc2: ``[n, H]``; zero where another rank with a slice of the same experts adds it.
    """

    fc1: Tensor
    fc2: Tensor


_PROBE = 32
"""Features of the tensors with which :func:`range_is_seen` probes the operator."""


def mixture_of_experts_reference(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    fc1: Tensor,
    fc2: Tensor,
    activation: Activation,
    first: int = 0,
    biases: ExpertBiases | None = None,
) -> Tensor:
    """:func:`mixture_of_experts` in plain torch: one product per expert, of its tokens.

    It synchronizes with the host once, for the number of tokens of each expert.
    """

    def compute(rows: Tensor, lengths: Sequence[int]) -> Tensor:
        inner = grouped_linear(rows, fc1.flatten(1, -2), lengths)
        if biases is not None:
            inner = add_group_bias(inner, biases.fc1, lengths)
        out = grouped_linear(activation(inner), fc2, lengths)
        return out if biases is None else add_group_bias(out, biases.fc2, lengths)

    return visit_experts(x, experts, weights, compute, first, fc2.shape[0])


def visit_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    compute: Callable[[Tensor, Sequence[int]], Tensor],
    first: int,
    here: int,
) -> Tensor:
    """``[T, H]``, the weighted sum of the outputs of a token's experts ``first .. first + here - 1``.

    Args:
        x: ``[T, H]``.
        experts: ``[T, k]`` ids over all ranks.
        weights: ``[T, k]``.
        compute: function of rows ``[n, H]``, sorted by expert, and the number of rows of each, that gives ``[n, H]``.
        first: id of the first expert.
        here: number of experts.
    """
    tokens, topk = experts.shape
    local = experts.flatten() - first
    local = torch.where((local < 0) | (local >= here), here, local)
    order = local.argsort(stable=True)
    counts = torch.zeros(here + 1, dtype=torch.int64, device=x.device)
    counts.scatter_add_(0, local, torch.ones_like(local))
    lengths = counts[:here].tolist()
    order = order[: sum(lengths)]
    sources = order // topk
    out = compute(x.index_select(0, sources), lengths)
    weighted = (out * weights.flatten()[order].unsqueeze(-1)).to(x.dtype)
    return x.new_zeros(tokens, out.shape[1]).index_add(0, sources, weighted)


def mixture_of_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    fc1: Tensor,
    fc2: Tensor,
    activation: Activation,
    first: int = 0,
    biases: ExpertBiases | None = None,
) -> Tensor:
    """Sum over a token's experts ``first .. first + n - 1`` of ``weight x fc2(activation(fc1(x)))``.

    Args:
        x: ``[T, H]``.
        experts: ``[T, k]`` ids over all ranks; ids of other ranks' experts, or beyond all, contribute nothing.
        weights: ``[T, k]`` fp32.
        fc1: ``[n, F, H]``, or ``[n, 2, F, H]`` for a gated activation.
        fc2: ``[n, H, F]``.
        first: id of the first expert of this rank.
        biases: biases of both layers; ``None`` for none.

    Returns:
        ``[T, H]``.
    """
    out: Tensor = MIXTURE_OF_EXPERTS.on(x.device.type)(x, experts, weights, fc1, fc2, activation, first, biases)
    return out


def fused_operator_missing() -> str | None:
    """The reason why there is no operator with gradients, or ``None``. Intel's has them (``recomp``) from 1.20.1 on."""
    operator = getattr(torch.ops.hpu, "mixture_of_experts", None)
    if operator is None or "fused_weights" not in operator.overloads():
        return missing("core", "mark_step") or "the bridge has no such operator"
    schema = operator.fused_weights._schema
    has_gradients = any(argument.name == "recomp" for argument in schema.arguments)
    return None if has_gradients else "this version of the bridge has no gradients of it"


def _beyond_operator(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    fc1: Tensor,
    fc2: Tensor,
    activation: Activation,
    first: int = 0,
    biases: ExpertBiases | None = None,
) -> str | None:
    if biases is not None:
        return "experts have biases"
    return None if activation is swiglu else "the operator is for SwiGLU"


def mixture_of_experts_fused(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    fc1: Tensor,
    fc2: Tensor,
    activation: Activation,
    first: int = 0,
    biases: ExpertBiases | None = None,
) -> Tensor:
    """:func:`mixture_of_experts` of SwiGLU experts by the Gaudi's operator; never run on a real Gaudi.

    The bridge has two kernels for it. One computes only choices within a range of experts: it gets the ids unchanged,
    and the range of this rank. The other multiplies every token by every expert of the list, reads ids as positions in
    it, and keeps only the last weight of an id that a token has twice: it gets every expert once, in order, with the
    token's weight for it, or 0. This second form is correct for both kernels, but more work for the first.
    """
    last = first + fc2.shape[0] - 1
    if not _takes_range(x):
        experts, weights = every_expert(experts, weights, fc2.shape[0], first)
        first, last = 0, last - first
    out: Tensor = torch.ops.hpu.mixture_of_experts.fused_weights(
        x,
        experts,
        weights.to(x.dtype),
        list(fc1.flatten(1, -2).unbind()),
        list(fc2.unbind()),
        permuted_weights=True,
        activation="silu",
        experts_min=first,
        experts_max=last,
    )
    return out


def every_expert(experts: Tensor, weights: Tensor, here: int, first: int) -> tuple[Tensor, Tensor]:
    """Ids ``0 .. here - 1`` for every token, and its weights for them; choices of other ranks' experts are left out.

    Args:
        experts: ``[T, k]`` ids over all ranks.
        weights: ``[T, k]``.
        here: number of experts on this rank.
        first: id of the first of them.

    Returns:
        ``[T, here]`` and ``[T, here]``.
    """
    local = experts - first
    outside = (local < 0) | (local >= here)
    table = weights.new_zeros(weights.shape[0], here)
    table = table.scatter_add(1, local.masked_fill(outside, 0), weights.masked_fill(outside, 0.0))
    return torch.arange(here, device=experts.device).repeat(len(experts), 1), table


def _takes_range(x: Tensor) -> bool:
    """True if a call in the present mode runs the kernel that uses the range of experts.

    In a graph this is certain only with gradients: without them a backend may run the operator as in eager mode.
    """
    if torch.compiler.is_compiling():
        return torch.is_grad_enabled()
    return range_is_seen(x.device.type, torch.is_grad_enabled(), torch.is_inference_mode_enabled())


@cache
def range_is_seen(device: str, gradients: bool, inference: bool) -> bool:
    """True if the bridge's kernel uses the range, found by a call, since versions differ; one call for each mode.

    With the range 1..2, expert 1 is the first of the list, whose output is not 0. Without it, it is the second.
    """
    with saved_tensors_hooks(lambda t: t, lambda t: t):  # keep these tensors out of hooks of the caller's checkpointing
        x = torch.ones(1, _PROBE, dtype=torch.bfloat16, device=device)
        one = torch.ones(1, 1, dtype=torch.bfloat16, device=device)
        w12, w3 = x.expand(2 * _PROBE, _PROBE).contiguous(), x.expand(_PROBE, _PROBE).contiguous()
        out = torch.ops.hpu.mixture_of_experts.fused_weights(
            x,
            torch.ones(1, 1, dtype=torch.int64, device=device),
            one,
            [w12, w12],
            [w3, torch.zeros_like(w3)],
            permuted_weights=True,
            activation="silu",
            experts_min=1,
            experts_max=2,
        )
        return bool((out.detach() != 0).any())


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
