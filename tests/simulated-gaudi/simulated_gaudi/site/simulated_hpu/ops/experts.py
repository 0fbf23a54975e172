"""Mixture of experts: ``sum_k w[t, k] (act(x w1) * (x w2)) w3`` over the experts a token is sent to.

The bridge has two kernels. The *dense* one multiplies every token by every expert, and writes the choices into a table
``[T, experts]`` with ``scatter_``: ids count from the rank's first expert, the range is ignored, and of an id that a
token has twice only one weight is kept. The *ranged* one computes the choices between ``experts_min`` and
``experts_max`` alone. Which one a call gets depends on the mode and the version:

======================= ============================== =======================
call                    eager                          lazy
======================= ============================== =======================
1.19                    dense, without a gradient      ranged, without one
newer, inference mode   dense                          ranged
newer, elsewhere        ranged; 1.22: dense            ranged
======================= ============================== =======================

A published version between 1.21 and 1.24 computes densely with gradients too, in eager mode; its number is not known,
and profile 1.22 stands for it. In a graph of ``torch.compile`` with gradients every version takes the ranged kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
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
_ALWAYS_DENSE = ("1.22",)
"""Profiles whose eager mode has no ranged kernel."""


def _products(x: Tensor, scale: Tensor, lists: list[list[Tensor]], permuted: bool, activation: str) -> Tensor:
    """All experts over all tokens.

    Args:
        x: ``[T, H]``.
        scale: ``[T, experts]``, zero where a token is not sent.
        lists: weights, a list for each group, with one tensor an expert.
        permuted: True if weights are ``[out, in]``.
        activation: name of the activation.
    """
    if activation not in _ACTIVATIONS:
        raise RuntimeError(f'Activation "{activation}" not found among MoeActivationMode_t enum values.')
    act = _ACTIVATIONS[activation]
    out = torch.zeros_like(x)
    for e, (w1, w2, w3) in enumerate(zip(*_split(lists, permuted), strict=True)):
        out = out + (scale[:, e, None] * ((act(x @ w1) * (x @ w2)) @ w3)).to(x.dtype)
    return out


def _split(lists: list[list[Tensor]], permuted: bool) -> tuple[list[Tensor], ...]:
    """The three matrices of all experts, ``[in, out]``, from the lists that an op takes."""
    if len(lists) == 2:  # w12, w3
        halves = [w.chunk(2, 0 if permuted else 1) for w in lists[0]]
        lists = [[a for a, _ in halves], [b for _, b in halves], lists[1]]
    return tuple([w.t() for w in group] if permuted else group for group in lists)


def _dense(
    x: Tensor, table: Tensor, router_weights: Tensor, lists: list[list[Tensor]], permuted: bool, activation: str,
    first: int, last: int,
) -> Tensor:  # fmt: skip
    """The dense kernel. Ids without an expert are an error, or undefined behaviour on a card."""
    experts = len(lists[-1])
    if table.numel() and (int(table.max()) >= experts or int(table.min()) < 0):
        raise RuntimeError(f"index {int(table.max())} is out of bounds for dimension 1 with size {experts}")
    dtype = x.dtype if settings().is_old else router_weights.dtype
    scale = torch.zeros(x.shape[0], experts, dtype=dtype, device=x.device).scatter_(-1, table, router_weights)
    calls.add_expert_rows("dense", x.shape[0] * experts)
    return _products(x, scale, lists, permuted, activation)


def _ranged(
    x: Tensor, table: Tensor, router_weights: Tensor, lists: list[list[Tensor]], permuted: bool, activation: str,
    first: int, last: int,
) -> Tensor:  # fmt: skip
    """The ranged kernel, without its checks."""
    here = (table >= first) & (table <= last)
    scale = torch.zeros(x.shape[0], last - first + 1, dtype=x.dtype, device=x.device)
    scale = scale.scatter_add(1, (table - first).where(here, 0), (router_weights * here).to(x.dtype))
    return _products(x, scale, lists, permuted, activation)


def chunks(tokens: int, choices: int, experts: int) -> tuple[int, int]:
    """Rows of a chunk, and number of chunks; each chunk is for rows of one expert.

    Real kernels use even larger chunks for very large batches, which hold at least as many rows.
    """
    unit = settings().product.expert_chunk_rows
    rows = max(1, min(4, ceil(choices * tokens / (2 * experts * unit)))) * unit
    if tokens <= unit:
        return rows, min(choices * tokens, experts)
    return rows, experts * (ceil(choices * tokens / (experts * rows)) + 1)


def _check_choices(table: Tensor, first: int, last: int) -> None:
    """Refuse choices that the ranged kernel does not support: more rows than the chunks hold, an id twice in a token.

    Chunks always suffice where the ids of a token differ.
    """
    here = [[e for e in row if first <= e <= last] for row in table.tolist()]
    rows = [sum(row.count(e) for row in here) for e in range(first, last + 1)]
    tokens, choices = table.shape
    size, held = chunks(tokens, choices, len(rows))
    if (needed := sum(ceil(n / size) for n in rows)) > held:
        raise RuntimeError(f"mixture_of_experts: rows {rows} need {needed} chunks of {size}, and there are {held}")
    for token, row in enumerate(here):
        if len(set(row)) < len(row):
            raise RuntimeError(f"mixture_of_experts: token {token} is sent to an expert twice: {row}")
    calls.add_expert_rows("ranged", sum(rows))


def _checked(x: Tensor, table: Tensor, router_weights: Tensor, *rest: Any) -> Tensor:
    _check_choices(table, *rest[-2:])
    return _ranged(x, table, router_weights, *rest)


def _gradients(grad: Tensor, x: Tensor, table: Tensor, router_weights: Tensor, *rest: Any) -> list[Tensor]:
    """Gradients of tokens, router's weights and matrices by the ranged kernel."""
    lists, tail = rest[0], rest[1:]
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (x, router_weights)]
        weights = [[w.detach().requires_grad_() for w in group] for group in lists]
        out = _ranged(leaves[0], table, leaves[1], weights, *tail)
    return list(torch.autograd.grad(out, [*leaves, *(w for group in weights for w in group)], grad))


class _Experts(torch.autograd.Function):
    """The ranged kernel with its gradient, each an op, so that graphs contain them."""

    @staticmethod
    def forward(
        ctx: Any, overload: str, x: Tensor, table: Tensor, router_weights: Tensor, groups: int, tail: Any, *w: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, table, router_weights, *w)
        ctx.overload, ctx.groups, ctx.tail = overload, groups, tail
        out: Tensor = _kernel("fwd", overload)(x, table, router_weights, *_grouped(w, groups), *tail)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, table, router_weights, *w = ctx.saved_tensors
        lists = _grouped(w, ctx.groups)
        gx, gr, *gw = _kernel("bwd", ctx.overload)(grad, x, table, router_weights, *lists, *ctx.tail)
        return None, gx, None, gr, None, None, *gw


def _kernel(direction: str, overload: str) -> Any:
    return getattr(getattr(torch.ops.hpu, f"mixture_of_experts_recomp_{direction}"), overload)


def _grouped(weights: Any, groups: int) -> list[list[Tensor]]:
    size = len(weights) // groups
    return [list(weights[i * size : (i + 1) * size]) for i in range(groups)]


def _op(overload: str, groups: tuple[str, ...]) -> None:
    """Define one overload, and its ranged kernels.

    Args:
        overload: name of the overload.
        groups: names of its lists of weights.
    """
    dot, number = "" if overload == "default" else f".{overload}", len(groups)
    lists = ", ".join(f"Tensor[] {group}" for group in groups)
    arguments = f"{_COMMON}, {lists}, {_RANGE}"

    def with_lists(body: Callable[..., Any], tensors: int = 3) -> Callable[..., Any]:
        """``body`` with its lists as one argument, without keywords."""
        return lambda *given, **_: body(*given[:tensors], given[tensors : tensors + number], *given[tensors + number :])

    like_x = lambda x, *_, **__: torch.empty_like(x)  # noqa: E731
    direct = _checked if settings().is_lazy else _dense
    more = {"1.19": "", "1.24": ", *, bool? recomp=True, int chunk_size=0, int total_experts=0"}
    extra = more.get(settings().profile, ", *, bool? recomp=True")
    define_op(f"mixture_of_experts{dot}({arguments}{extra}) -> Tensor", with_lists(direct), like_x)
    if settings().is_old:
        return

    def shapes(grad: Tensor, x: Tensor, _: Tensor, router_weights: Tensor, *rest: Any) -> list[Tensor]:
        return [torch.empty_like(t) for t in (x, router_weights, *(w for group in rest[:number] for w in group))]

    forward = f"mixture_of_experts_recomp_fwd{dot}({arguments}) -> Tensor"
    backward = f"mixture_of_experts_recomp_bwd{dot}(Tensor grad_tokens_in, {arguments}) -> Tensor[]"
    define_op(forward, with_lists(_checked), like_x)
    define_op(backward, with_lists(_gradients, tensors=4), shapes)

    def with_gradient(x: Tensor, table: Tensor, router_weights: Tensor, *rest: Any, **_: Any) -> Tensor:
        """The op outside of inference mode, where it needs no tensor that requires a gradient."""
        given, tail = rest[:number], rest[number:]
        traced = type(x) not in (Tensor, torch.nn.Parameter)
        if not (traced or settings().is_lazy) and settings().profile in _ALWAYS_DENSE:
            calls.count(f"hpu::mixture_of_experts{dot}")
            return _dense(x, table, router_weights, list(given), *tail)
        weights = [w for group in given for w in group]
        out: Tensor = _Experts.apply(overload, x, table, router_weights, number, tail, *weights)
        return out

    differentiate(f"mixture_of_experts{dot}", with_gradient)


def define() -> None:
    """Define the overloads for separate and for joined weights; 1.19 has no gradient of them."""
    _op("default", ("w1", "w2", "w3"))
    _op("fused_weights", ("w12", "w3"))
