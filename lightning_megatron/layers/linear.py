"""Linear layers whose weight is sharded over the tensor-parallel ranks (https://arxiv.org/abs/1909.08053).

Shapes, with ``R`` the number of ranks, weight ``[out, in]`` and ``SP`` short for sequence parallelism:

=======================  ==========================  ===========================
layer                    input                       output
=======================  ==========================  ===========================
column                   ``[S, B, in]``              ``[S, B, out/R]``
column, SP               ``[S/R, B, in]``            ``[S, B, out/R]``
row                      ``[S, B, in/R]``            ``[S, B, out]``
row, SP                  ``[S, B, in/R]``            ``[S/R, B, out]``
=======================  ==========================  ===========================

``torch.compile`` leaves out layers on several ranks entirely: a collective would break the graph anyway, and each
function around it would break it again.
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
from lightning_megatron.ops.accumulate import add_product_
from lightning_megatron.ops.implementation import OpChoice
from lightning_megatron.ops.matmul import PLAIN_GEMMS, HasGemms, LinearGemms, linear
from lightning_megatron.params import ParamSpec
from lightning_megatron.weight_grad_store import WeightGradStore


class _Linear(torch.autograd.Function):
    """``x W^T + b`` with the collectives of the backward pass overlapped with its matrix products.

    Backward starts the reduction of ``dx = dy W`` over ``axis``, computes ``dW = dy^T x`` meanwhile, and waits. Under
    sequence parallelism only the shard of ``x`` is saved; it is gathered again while ``dx`` is computed
    (https://arxiv.org/abs/2205.05198, section 4.2.2).

    Without an ``axis`` nothing is communicated. The parameters are passed again in ``leaves``. If the store has a place
    for the weight's gradient, it is added there. With ``defers`` the parameters are passed detached, and their
    gradients go through the store. In both cases autograd gets ``None`` for such a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        axis: Axis | None,
        sequence_parallel: bool,
        gemms: LinearGemms,
        store: WeightGradStore,
        leaves: tuple[Tensor, Tensor | None],
        defers: bool,
    ) -> Tensor:
        ctx.axis, ctx.sequence_parallel = axis, sequence_parallel
        ctx.gemms, ctx.store, ctx.leaves, ctx.defers = gemms, store, leaves, defers
        whole = all_gather(x, axis) if axis is not None and sequence_parallel else x  # [S, B, in]
        out, kept = gemms.forward(whole, weight, bias)
        ctx.save_for_backward(x, weight, bias, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, *kept = ctx.saved_tensors
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        store: WeightGradStore = ctx.store
        if ctx.defers:
            needs_dw, needs_db = (leaf is not None and leaf.requires_grad for leaf in ctx.leaves)
        whole_x = start_all_gather(x, ctx.axis) if ctx.sequence_parallel and needs_dw else Pending(x)
        gemms: LinearGemms = ctx.gemms
        factor = gemms.gradient(dy)
        pending_dx = None
        if needs_dx:
            pending_dx = _start_sum(gemms.input_gradient(factor, weight, kept), ctx.axis, ctx.sequence_parallel)

        def weight_gradients() -> tuple[Tensor | None, Tensor | None]:
            place = store.place_of(ctx.leaves[0]) if needs_dw and gemms is PLAIN_GEMMS else None
            dw = None
            if place is not None:
                add_product_(place, dy.flatten(0, -2).t(), whole_x.wait().flatten(0, -2))
            elif needs_dw:
                dw = gemms.weight_gradient(factor, whole_x.wait(), kept).view_as(weight)
            db = dy.flatten(0, -2).sum(0).view_as(bias) if bias is not None and needs_db else None
            return dw, db

        dw = db = None
        if ctx.defers:
            store.put(weight_gradients, *ctx.leaves)
        else:
            dw, db = weight_gradients()
        return pending_dx.wait() if pending_dx is not None else None, dw, db, *(None,) * 6


def _start_sum(dx: Tensor, axis: Axis | None, sequence_parallel: bool) -> Pending:
    """Start the sum of an input's gradient over the ranks; a sequence shard gets its shard of the sum."""
    if axis is None:
        return Pending(dx)
    return (start_reduce_scatter if sequence_parallel else start_all_reduce)(dx, axis)


class _TensorParallelLinear(nn.Module):
    """Common part of the two layers below: the matrix products and their gradients.

    Attributes:
        products: matrix products of forward and backward. This attribute's name is in the checkpoint keys of fp8.
        product_choice: choice of these products, for the op report; ``None`` where there was no choice.
        lora: adapters of the layer; ``None`` without.
    """

    weight: nn.Parameter

    def __init__(self, in_features: int, out_features: int, mesh: ParallelMesh, sequence_parallel: bool) -> None:
        super().__init__()
        self.axis, self.weight_grads = mesh.tp, mesh.weight_grads
        self.in_features, self.out_features = in_features, out_features
        self.sequence_parallel = sequence_parallel and self.axis.size > 1
        self.products: LinearGemms = PLAIN_GEMMS
        self.product_choice: OpChoice[Any] | None = None
        self.lora: nn.Module | None = None

    def _adapted(self, x: Tensor, out: Tensor, bias: Tensor | None) -> Tensor:
        """Add the adapter's output, if there is an adapter, to that of this rank, which contains ``bias``."""
        return out if self.lora is None else self.lora(x, out, self.weight, bias)

    @property
    def effective_weight(self) -> Tensor:
        """The weight by which the layer multiplies, an adapter included."""
        weight: Tensor = self.weight if self.lora is None else self.lora.merged(self.weight)  # type: ignore[operator]
        return weight

    def _linear(self, x: Tensor, bias: Tensor | None, axis: Axis | None = None) -> Tensor:
        """``x W^T + b``.

        Args:
            x: ``[S, B, in]`` of this rank; with ``axis``, under sequence parallelism, a sequence shard.
            bias: bias to add, or ``None``.
            axis: ranks over which the gradient of ``x`` is summed; ``None`` for none.
        """
        gemms, store = self.products, self.weight_grads
        if axis is None and gemms is PLAIN_GEMMS and not (store.enabled or store.takes_gradients):
            return linear(x, self.weight, bias)  # autograd's own backward: nothing to overlap, replace, defer or add
        gemms.prepare(self.weight)
        how = axis, self.sequence_parallel and axis is not None, gemms, store, (self.weight, bias)
        out: Tensor
        if store.enabled and x.requires_grad:
            hidden_bias = None if bias is None else bias.detach()
            out = _Linear.apply(x, self.weight.detach(), hidden_bias, *how, True)
        else:
            out = _Linear.apply(x, self.weight, bias, *how, False)
        return out

    def extra_repr(self) -> str:
        """Global sizes."""
        return f"in={self.in_features}, out={self.out_features}, tp={self.axis.size}"


def use_gemms(layer: HasGemms, gemms: LinearGemms, choice: OpChoice[Any]) -> None:
    """Compute the products of a layer with ``gemms``, for the reason in ``choice``."""
    layer.products, layer.product_choice = gemms, choice


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


class ColumnParallelLinear(_TensorParallelLinear):
    """Linear layer whose output features are sharded over the tensor-parallel ranks.

    Args:
        in_features: features of the input.
        out_features: features of the output over all ranks.
        mesh: mesh of the ranks; ``None`` for one process.
        bias: True to add a bias (sharded like the output).
        blocks: number of matrices side by side in the output (gate and up of a gated layer). Each rank holds its slice
            of every one, stored as ``[blocks, out/blocks, in]`` so that a shard is a plain slice.
        gather_output: True to return ``[..., out]`` on every rank instead of this rank's slice.
        sequence_parallel: True if the input is a sequence shard ``[S/tp, B, in]``.
        init_std: standard deviation of the initial weight.
        dtype: dtype of the parameters.
        device: device of the parameters.

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
        mesh = mesh or ParallelMesh.single()
        super().__init__(in_features, out_features, mesh, sequence_parallel)
        self.blocks, self.gather_output = blocks, gather_output
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
        if self.axis.size > 1:
            return self._forward_on_ranks(x)
        return self._adapted(x, self._linear(x, self.bias), self.bias)

    @torch.compiler.disable
    def _forward_on_ranks(self, x: Tensor) -> Tensor:
        out = self._adapted(x, self._linear(x, self.bias, self.axis), self.bias)  # [S, B, out/tp]
        if not self.gather_output:
            return out
        # Gather block by block: the result is ordered by blocks, not by ranks.
        return gather_features(out.unflatten(-1, (self.blocks, -1)), self.axis).flatten(-2)


class RowParallelLinear(_TensorParallelLinear):
    """Linear layer whose input features are sharded over the tensor-parallel ranks; the partial products are summed.

    Args:
        in_features: features of the input over all ranks.
        out_features: features of the output.
        mesh: mesh of the ranks; ``None`` for one process.
        bias: True to add a bias, which every rank holds whole and which is added once, after the sum.
        split_input: True if the input is whole on every rank and this layer takes its slice.
        sequence_parallel: True to return a sequence shard ``[S/tp, B, out]``.
        init_std: standard deviation of the initial weight.
        dtype: dtype of the parameters.
        device: device of the parameters.

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
        mesh = mesh or ParallelMesh.single()
        super().__init__(in_features, out_features, mesh, sequence_parallel)
        self.split_input = split_input
        local = _split("in_features", in_features, self.axis)
        self.weight = nn.Parameter(torch.empty(out_features, local, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=dtype, device=device)) if bias else None
        normal_(self.weight, self.param_specs()["weight"], mesh.shard_ranks, init_std)

    def param_specs(self) -> Mapping[str, ParamSpec]:
        """The weight is cut along the input features; the bias is whole, and under SP its gradient is a partial sum."""
        shape = (self.out_features, self.in_features)
        return {
            "weight": ParamSpec(shape, tp_dim=1),
            "bias": ParamSpec(shape[:1], grad_sum_over_tp=self.sequence_parallel, decay=False),
        }

    def forward(self, x: Tensor) -> Tensor:
        """``[S, B, in/tp]`` to ``[S, B, out]`` (``[S/tp, B, out]`` under sequence parallelism)."""
        if self.axis.size > 1:
            return self._forward_on_ranks(x)
        return self._adapted(x, self._linear(x, self.bias), self.bias)

    @torch.compiler.disable
    def _forward_on_ranks(self, x: Tensor) -> Tensor:
        if self.split_input:
            x = split_features(x, self.axis)
        partial = self._linear(x, None)  # [S, B, out], summed below; the bias is added once, after the sum
        out = (reduce_scatter_sequence if self.sequence_parallel else reduce_from_region)(partial, self.axis)
        out = self._adapted(x, out, None)
        return out if self.bias is None else out + self.bias
