"""Linear layer replicated on every tensor-parallel rank, for the small matrices in and beside a model's blocks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_megatron.layers.init import normal_
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.ops.matmul import linear
from lightning_megatron.params import ParamSpec


class WholeLinear(nn.Module):
    """``x W^T + b`` with replicated weights. All ranks compute the same or, with sequence shards, their own tokens.

    Args:
        in_features: features of the input.
        out_features: features of the output.
        sequence_parallel: True if the input is a sequence shard; gradients of the weights are then summed over tp.
        init_std: standard deviation of the initial weight.
        bias: True to add a bias.

    Attributes:
        lora: adapters of the layer; ``None`` without.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mesh: ParallelMesh,
        *,
        sequence_parallel: bool,
        init_std: float,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel and mesh.tp.size > 1
        self.lora: nn.Module | None = None
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        normal_(self.weight, self.param_specs()["weight"], mesh.shard_ranks, init_std)

    def param_specs(self) -> Mapping[str, ParamSpec]:
        """Weight and bias are whole on every rank."""
        return {
            "weight": ParamSpec(tuple(self.weight.shape), grad_sum_over_tp=self.sequence_parallel),
            "bias": ParamSpec(tuple(self.weight.shape[:1]), grad_sum_over_tp=self.sequence_parallel, decay=False),
        }

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in] -> [..., out]``."""
        out = linear(x, self.weight, self.bias)
        return out if self.lora is None else self.lora(x, out, self.weight, self.bias)
