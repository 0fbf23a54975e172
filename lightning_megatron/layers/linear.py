"""Linear layers whose weight is shared by the ranks of the tensor-parallel axis (https://arxiv.org/abs/1909.08053).

Shapes, with ``R`` the size of the axis, weight ``[out, in]`` and ``SP`` short for sequence parallelism:

=======================  ==========================  ===========================
layer                    input                       output
=======================  ==========================  ===========================
column                   ``[S, B, in]``              ``[S, B, out/R]``
column, SP               ``[S/R, B, in]``            ``[S, B, out/R]``
row                      ``[S, B, in/R]``            ``[S, B, out]``
row, SP                  ``[S, B, in/R]``            ``[S/R, B, out]``
=======================  ==========================  ===========================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.comm.collectives import (
    Pending,
    all_gather,
    gather_features,
    reduce_from_region,
    reduce_scatter_sequence,
    split_features,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from lightning_megatron.errors import Problem, divisors, multiples_around, nearest_to, raise_if_any
from lightning_megatron.layers.init import normal_
from lightning_megatron.mesh import Axis, ParallelMesh
from lightning_megatron.ops.implementation import Selection
from lightning_megatron.ops.matmul import PLAIN_GEMMS, LinearGemms, linear
from lightning_megatron.params import ParamSpec
from lightning_megatron.weight_grad_store import DeferredGradients


class _Linear(torch.autograd.Function):
    """``x W^T`` with the collectives of the backward pass hidden behind its matrix products.

    Before: dx = dy W, all-reduce dx, dW = dy^T x. Now: dx = dy W, begin all-reduce, dW = dy^T x, wait. Under sequence
    parallelism only the shard of ``x`` is kept; it is gathered again while ``dx`` is computed
    (https://arxiv.org/abs/2205.05198, section 4.2.2).

    ``axis`` is who the gradient of ``x`` is summed over; one rank where ``x`` is a shard of features (row). With
    ``deferred`` the parameters come in ``leaves``, out of autograd's sight, and their gradients go through the open
    collection: autograd takes a ``None`` for a gradient that has arrived. ``products`` multiply.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        axis: Axis,
        sequence_parallel: bool,
        deferred: DeferredGradients | None,
        leaves: tuple[Tensor | None, ...],
        products: LinearGemms,
    ) -> Tensor:
        ctx.products = products
        ctx.axis, ctx.sequence_parallel, ctx.deferred, ctx.leaves = axis, sequence_parallel, deferred, leaves
        whole = all_gather(x, axis) if sequence_parallel else x
        out, kept = products.forward(whole, weight, bias)
        ctx.save_for_backward(x, weight, bias, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, *kept = ctx.saved_tensors
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        if ctx.deferred is not None:
            needs_dw, needs_db = (leaf is not None and leaf.requires_grad for leaf in ctx.leaves)
        whole_x = start_all_gather(x, ctx.axis) if ctx.sequence_parallel and needs_dw else Pending(x)
        start = start_reduce_scatter if ctx.sequence_parallel else start_all_reduce
        products = ctx.products
        factor = products.gradient(dy)
        pending_dx = start(products.input_gradient(factor, weight, kept), ctx.axis) if needs_dx else None

        def weight_gradients() -> tuple[Tensor | None, Tensor | None]:
            dw = products.weight_gradient(factor, whole_x.wait(), kept).view_as(weight) if needs_dw else None
            db = dy.flatten(0, -2).sum(0).view_as(bias) if bias is not None and needs_db else None
            return dw, db

        dw = db = None
        if ctx.deferred is None:
            dw, db = weight_gradients()
        else:
            ctx.deferred.hand_in(weight_gradients, *ctx.leaves)
        return pending_dx.wait() if pending_dx is not None else None, dw, db, *(None,) * 5


def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    axis: Axis,
    sequence_parallel: bool,
    deferred: DeferredGradients,
    products: LinearGemms,
) -> Tensor:
    """The function above, with its parameters seen by autograd or not."""
    if not (deferred.enabled and x.requires_grad):
        out: Tensor = _Linear.apply(x, weight, bias, axis, sequence_parallel, None, (), products)
    else:
        hidden_bias = None if bias is None else bias.detach()
        leaves = weight, bias
        out = _Linear.apply(x, weight.detach(), hidden_bias, axis, sequence_parallel, deferred, leaves, products)
    return out


_ALONE = Axis("alone")


def _split(argument: str, features: int, axis: Axis, blocks: int = 1) -> int:
    """Features of one block on one rank."""
    if features % blocks:
        reason = f"does not split into blocks={blocks} matrices"
        raise_if_any([Problem(argument, features, reason, multiples_around(features, blocks))])
    if features // blocks % axis.size:
        of_blocks = "" if blocks == 1 else f" in {blocks} blocks"
        reason = f"{argument}={features}{of_blocks} does not split over tp={axis.size} ranks"
        raise_if_any([Problem("tp", axis.size, reason, nearest_to(axis.size, divisors(features // blocks)))])
    return features // blocks // axis.size


class ColumnParallelLinear(nn.Module):
    """A linear layer whose output features are shared by the tensor-parallel ranks.

    Args:
        in_features: features of the input.
        out_features: features of the output over all ranks.
        mesh: the ranks; ``None`` for one process.
        bias: whether to add a bias (sharded like the output).
        blocks: the output is this many matrices side by side (gate and up of a gated layer): each rank holds its
            slice of every one, stored ``[blocks, out/blocks, in]`` so that a shard is a plain slice.
        gather_output: return ``[..., out]`` on every rank instead of this rank's slice.
        sequence_parallel: the input is a sequence shard ``[S/tp, B, in]``.
        init_std: standard deviation of the initial weight.
        dtype: of the parameters.
        device: of the parameters.

    Attributes:
        products: how it multiplies.
        product_choice: why so, for the report, where somebody has looked.

    Raises:
        ConfigError: if the features do not split over the ranks.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mesh: ParallelMesh | None = None,
        *,
        bias: bool = True,
        blocks: int = 1,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        init_std: float = 0.02,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        mesh = mesh or ParallelMesh.single()
        self.axis, self.deferred = mesh.tp, mesh.deferred
        self.products: LinearGemms = PLAIN_GEMMS
        self.product_choice: Selection | None = None
        self.in_features, self.out_features, self.blocks = in_features, out_features, blocks
        self.gather_output = gather_output
        self.sequence_parallel = sequence_parallel and self.axis.size > 1
        local = _split("out_features", out_features, self.axis, blocks)
        lead = () if blocks == 1 else (blocks,)
        self.weight = nn.Parameter(torch.empty(*lead, local, in_features, dtype=dtype, device=device))
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.zeros(*lead, local, dtype=dtype, device=device))
        normal_(self.weight, self.param_specs()["weight"], mesh.shard_ranks, init_std)

    def param_specs(self) -> Mapping[str, ParamSpec]:
        """Weight and bias are cut along the output features."""
        lead = () if self.blocks == 1 else (self.blocks,)
        shape = (*lead, self.out_features // self.blocks)
        return {
            "weight": ParamSpec((*shape, self.in_features), tp_dim=len(lead)),
            "bias": ParamSpec(shape, tp_dim=len(lead), decay=False),
        }

    def forward(self, x: Tensor) -> Tensor:
        """``[S, B, in]`` (``[S/tp, B, in]`` under sequence parallelism) to ``[S, B, out/tp]``; blocks side by side."""
        if self.axis.size == 1 and not self.deferred.enabled and self.products is PLAIN_GEMMS:
            return linear(x, self.weight, self.bias)
        out = _linear(x, self.weight, self.bias, self.axis, self.sequence_parallel, self.deferred, self.products)
        if not self.gather_output:
            return out
        # Block by block, so that the result is the blocks side by side and not the ranks.
        return gather_features(out.unflatten(-1, (self.blocks, -1)), self.axis).flatten(-2)

    def extra_repr(self) -> str:
        """The sizes, global."""
        return f"in={self.in_features}, out={self.out_features}, tp={self.axis.size}"


class RowParallelLinear(nn.Module):
    """A linear layer whose input features are shared by the tensor-parallel ranks; the partial products are summed.

    Args:
        in_features: features of the input over all ranks.
        out_features: features of the output.
        mesh: the ranks; ``None`` for one process.
        bias: whether to add a bias; held whole by every rank and added once, after the sum.
        split_input: the input is whole on every rank and this layer takes its slice.
        sequence_parallel: return a sequence shard ``[S/tp, B, out]``.
        init_std: standard deviation of the initial weight.
        dtype: of the parameters.
        device: of the parameters.

    Attributes:
        products: how it multiplies.
        product_choice: why so, for the report, where somebody has looked.

    Raises:
        ConfigError: if the features do not split over the ranks.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mesh: ParallelMesh | None = None,
        *,
        bias: bool = True,
        split_input: bool = False,
        sequence_parallel: bool = False,
        init_std: float = 0.02,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        mesh = mesh or ParallelMesh.single()
        self.axis, self.deferred = mesh.tp, mesh.deferred
        self.products: LinearGemms = PLAIN_GEMMS
        self.product_choice: Selection | None = None
        self.in_features, self.out_features = in_features, out_features
        self.split_input = split_input
        self.sequence_parallel = sequence_parallel and self.axis.size > 1
        local = _split("in_features", in_features, self.axis)
        self.weight = nn.Parameter(torch.empty(out_features, local, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=dtype, device=device)) if bias else None
        normal_(self.weight, self.param_specs()["weight"], mesh.shard_ranks, init_std)

    def param_specs(self) -> Mapping[str, ParamSpec]:
        """The weight is cut along the input features; the bias is whole, and meets only a shard of the sequence."""
        shape = (self.out_features, self.in_features)
        return {
            "weight": ParamSpec(shape, tp_dim=1),
            "bias": ParamSpec(shape[:1], grad_sum_over_tp=self.sequence_parallel, decay=False),
        }

    def forward(self, x: Tensor) -> Tensor:
        """``[S, B, in/tp]`` to ``[S, B, out]`` (``[S/tp, B, out]`` under sequence parallelism)."""
        if self.split_input:
            x = split_features(x, self.axis)
        added = self.bias if self.axis.size == 1 else None  # elsewhere once, after the sum
        if self.deferred.enabled or self.products is not PLAIN_GEMMS:
            partial = _linear(x, self.weight, added, _ALONE, False, self.deferred, self.products)
        else:
            partial = linear(x, self.weight, added)
        if self.axis.size == 1:
            return partial
        out = (reduce_scatter_sequence if self.sequence_parallel else reduce_from_region)(partial, self.axis)
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        """The sizes, global."""
        return f"in={self.in_features}, out={self.out_features}, tp={self.axis.size}"
