"""Mixture of experts: ``sum_k w[t, k] (act(x w1) * (x w2)) w3`` over the experts a token is sent to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from simulated_hpu import calls
from simulated_hpu.ops.registry import define_op, differentiate
from simulated_hpu.settings import settings

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}
_COMMON = "Tensor hidden_states, Tensor expert_routing_table, Tensor router_weights"
_RANGE = "bool permuted_weights, str activation, int experts_min, int experts_max"


def _dense(x: Tensor, scale: Tensor, w1: list[Tensor], w2: list[Tensor], w3: list[Tensor], activation: str) -> Tensor:
    """All experts over all tokens.

    Args:
        x: ``[T, H]``.
        scale: ``[T, experts]``, zero where a token is not sent.
        w1: ``[H, F]`` an expert.
        w2: likewise.
        w3: ``[F, H]`` an expert.
        activation: its name.
    """
    if activation not in _ACTIVATIONS:
        raise RuntimeError(f'Activation "{activation}" not found among MoeActivationMode_t enum values.')
    act = _ACTIVATIONS[activation]
    out = torch.zeros_like(x)
    for e in range(len(w3)):
        out = out + scale[:, e, None] * ((act(x @ w1[e]) * (x @ w2[e])) @ w3[e])
    return out


def _split(weights: list[Tensor], count: int, permuted: bool) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The three matrices of all experts, ``[in, out]``, from the flat list an op takes."""
    if len(weights) == 2 * count:  # w12, w3
        halves = [w.chunk(2, 0 if permuted else 1) for w in weights[:count]]
        w1, w2, w3 = [a for a, _ in halves], [b for _, b in halves], weights[count:]
    else:
        w1, w2, w3 = weights[:count], weights[count : 2 * count], weights[2 * count :]
    if permuted:
        w1, w2, w3 = ([w.t() for w in group] for group in (w1, w2, w3))
    return w1, w2, w3


def _scatter(table: Tensor, router_weights: Tensor, experts: int, dtype: torch.dtype) -> Tensor:
    """``[T, experts]``; raises if an id is not among them."""
    if table.numel() and (int(table.max()) >= experts or int(table.min()) < 0):
        raise RuntimeError(f"index {int(table.max())} is out of bounds for dimension 1 with size {experts}")
    scale = torch.zeros(table.shape[0], experts, dtype=dtype, device=table.device)
    return scale.scatter_add(1, table.long(), router_weights.to(dtype))


def _eager(
    x: Tensor, table: Tensor, router_weights: Tensor, weights: list[Tensor], count: int, permuted: bool, activation: str
) -> Tensor:
    """Without a gradient the eager kernel does not look at the range of experts: ids count from its first."""
    scale = _scatter(table, router_weights, count, x.dtype)
    return _dense(x, scale, *_split(weights, count, permuted), activation)


def _in_range(
    x: Tensor, table: Tensor, router_weights: Tensor, weights: list[Tensor], permuted: bool, activation: str,
    first: int, last: int,
) -> Tensor:  # fmt: skip
    """What is sent to experts out of the range is left out."""
    count = last - first + 1
    here = (table >= first) & (table <= last)
    scale = _scatter((table - first).where(here, 0), router_weights * here, count, x.dtype)
    return _dense(x, scale, *_split(weights, count, permuted), activation)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, table: Tensor, router_weights: Tensor, rest: tuple[Any, ...], *w: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, table, router_weights, *w)
        ctx.rest = rest
        return _in_range(x, table, router_weights, list(w), *rest)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, table, router_weights, *w = ctx.saved_tensors
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (x, router_weights, *w)]
            out = _in_range(leaves[0], table, leaves[1], leaves[2:], *ctx.rest)
        gx, gr, *gw = torch.autograd.grad(out, leaves, grad)
        return gx, None, gr, None, *gw


def _op(name: str, groups: tuple[str, ...]) -> None:
    """Define one overload.

    Args:
        name: with its overload.
        groups: names of its lists of weights.
    """

    def body(x: Tensor, table: Tensor, router_weights: Tensor, *rest: Any, recomp: bool | None = True) -> Tensor:
        lists, (permuted, activation, _, _) = rest[: len(groups)], rest[len(groups) :]
        weights = [w for group in lists for w in group]
        return _eager(x, table, router_weights, weights, len(lists[-1]), permuted, activation)

    lists = ", ".join(f"Tensor[] {group}" for group in groups)
    more = "" if settings().is_old else ", *, bool? recomp=True"
    define_op(f"{name}({_COMMON}, {lists}, {_RANGE}{more}) -> Tensor", body, lambda x, *_, **__: torch.empty_like(x))
    if settings().is_old:
        return

    def with_gradient(
        x: Tensor, table: Tensor, router_weights: Tensor, *rest: Any, recomp: bool | None = True
    ) -> Tensor:
        lists, tail = rest[: len(groups)], rest[len(groups) :]
        weights = [w for group in lists for w in group]
        if torch.is_grad_enabled() and any(t.requires_grad for t in (x, router_weights, *weights)):
            calls.count(f"hpu::{name}")
            return _Experts.apply(x, table, router_weights, tail, *weights)
        with torch.no_grad():
            calls.count(f"hpu::{name}")
            return body(x, table, router_weights, *rest)

    differentiate(name, with_gradient)


def define() -> None:
    """Define the overloads for separate and for joined weights; only the newer profile has their gradient."""
    _op("mixture_of_experts", ("w1", "w2", "w3"))
    _op("mixture_of_experts.fused_weights", ("w12", "w3"))
