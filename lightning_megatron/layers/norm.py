"""Norms whose weights every tensor-parallel rank holds whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.ops.norm import layer_norm, rms_norm
from lightning_megatron.params import ParamSpec


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension.

    Args:
        size: length of the last dimension.
        mesh: the ranks; ``None`` for one process.
        eps: added to the mean square.
        sequence_parallel: the input is a sequence shard, so that weight gradients must be summed over tp.
        dtype: of the weight.
        device: of the weight.
    """

    def __init__(
        self,
        size: int,
        mesh: ParallelMesh | None = None,
        *,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device))
        self._grad_sum = sequence_parallel and mesh is not None and mesh.tp.size > 1

    def param_specs(self) -> Mapping[str, ParamSpec]:
        """Whole on every rank, never decayed."""
        return {
            name: ParamSpec(tuple(p.shape), grad_sum_over_tp=self._grad_sum, decay=False)
            for name, p in self.named_parameters(recurse=False)
        }

    def forward(self, x: Tensor) -> Tensor:
        """``[..., H] -> [..., H]``."""
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(RMSNorm):
    """Layer norm over the last dimension; arguments as for :class:`RMSNorm`."""

    def __init__(
        self,
        size: int,
        mesh: ParallelMesh | None = None,
        *,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(size, mesh, eps=eps, sequence_parallel=sequence_parallel, dtype=dtype, device=device)
        self.bias = nn.Parameter(torch.zeros(size, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """``[..., H] -> [..., H]``."""
        return layer_norm(x, self.weight, self.bias, self.eps)


NORMS: Mapping[str, Callable[..., RMSNorm]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}
