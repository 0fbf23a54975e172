"""Norms; every tensor-parallel rank holds their weights whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.ops.registry import ANY_DEVICE, Ops
from lightning_megatron.params import ParamSpec


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension.

    Args:
        size: length of the last dimension.
        mesh: mesh of the ranks; ``None`` for one process.
        eps: constant added to the mean square.
        sequence_parallel: True if the input is a sequence shard; weight gradients are then summed over tp.
        ops: implementations of the ops.
        dtype: dtype of the weight.
        device: device of the weight.
    """

    op = "rms_norm"

    def __init__(
        self,
        size: int,
        mesh: ParallelMesh | None = None,
        *,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        ops: Ops = ANY_DEVICE,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.norm = ops.choose(self.op)
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device))
        self._grad_sum = sequence_parallel and mesh is not None and mesh.tp.size > 1

    def param_specs(self) -> Mapping[str, ParamSpec]:
        """Weight and bias are whole on every rank, and not decayed."""
        return {
            name: ParamSpec(tuple(p.shape), grad_sum_over_tp=self._grad_sum, decay=False)
            for name, p in self.named_parameters(recurse=False)
        }

    def forward(self, x: Tensor) -> Tensor:
        """``[..., H] -> [..., H]``."""
        out: Tensor = self.norm.run(x, self.weight, self.eps)
        return out


class LayerNorm(RMSNorm):
    """Layer norm over the last dimension; arguments as for :class:`RMSNorm`."""

    op = "layer_norm"

    def __init__(
        self,
        size: int,
        mesh: ParallelMesh | None = None,
        *,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        ops: Ops = ANY_DEVICE,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(size, mesh, eps=eps, sequence_parallel=sequence_parallel, ops=ops, dtype=dtype, device=device)
        self.bias = nn.Parameter(torch.zeros(size, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """``[..., H] -> [..., H]``."""
        out: Tensor = self.norm.run(x, self.weight, self.bias, self.eps)
        return out


NORMS: Mapping[str, Callable[..., RMSNorm]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}
