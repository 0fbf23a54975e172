"""Norms; every tensor-parallel rank holds their weights whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.ops.registry import ANY_DEVICE, Ops
from lightning_megatron.params import ParamSpec


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension.

    Args:
        size: length of the last dimension.
        mesh: mesh of the ranks; ``None`` for one process.
        eps: constant added to the mean square.
        zero_centered: True to multiply by ``1 + weight``.
        sequence_parallel: True if tensor-parallel ranks norm different tokens or heads, whose gradients are summed.
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
        zero_centered: bool = False,
        sequence_parallel: bool = False,
        ops: Ops = ANY_DEVICE,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.zero_centered = eps, zero_centered
        self.norm = ops.choose(self.op)
        self.weight = nn.Parameter(torch.full((size,), 0.0 if zero_centered else 1.0, dtype=dtype, device=device))
        self._grad_sum = sequence_parallel and mesh is not None and mesh.tp.size > 1

    def param_specs(self) -> Mapping[str, ParamSpec]:
        """Weight and bias are whole on every rank, and not decayed."""
        return {
            name: ParamSpec(tuple(p.shape), grad_sum_over_tp=self._grad_sum, decay=False)
            for name, p in self.named_parameters(recurse=False)
        }

    @property
    def factor(self) -> Tensor:
        """Factor of the normed values, ``[H]``."""
        return self.weight + 1 if self.zero_centered else self.weight

    def forward(self, x: Tensor) -> Tensor:
        """``[..., H] -> [..., H]``."""
        out: Tensor = self.norm.run(x, self.factor, self.eps)
        return out


class LayerNorm(RMSNorm):
    """Layer norm over the last dimension; arguments as for :class:`RMSNorm`."""

    op = "layer_norm"

    def __init__(self, size: int, mesh: ParallelMesh | None = None, **options: Any) -> None:
        super().__init__(size, mesh, **options)
        self.bias = nn.Parameter(torch.zeros_like(self.weight))

    def forward(self, x: Tensor) -> Tensor:
        """``[..., H] -> [..., H]``."""
        out: Tensor = self.norm.run(x, self.factor, self.bias, self.eps)
        return out


NORMS: Mapping[str, Callable[..., RMSNorm]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}


def model_norm(config: TransformerConfig, size: int, mesh: ParallelMesh, sequence_parallel: bool, ops: Ops) -> RMSNorm:
    """A norm of ``size`` features as the model has them; other arguments as for :class:`RMSNorm`."""
    how: dict[str, Any] = {"eps": config.norm_epsilon, "zero_centered": config.norm_zero_centered, "ops": ops}
    return NORMS[config.norm](size, mesh, sequence_parallel=sequence_parallel, **how)
