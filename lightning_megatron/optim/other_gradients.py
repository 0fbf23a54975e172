"""Gradients of parameters that user code steps itself: by hand, or with an optimizer that it has not returned."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lightning_megatron.comm.collectives import all_reduce_in_place, all_reduce_max
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.params import ParamSpec


class OtherGradients:
    """Averages the gradients that no distributed optimizer reduces, as ``DistributedDataParallel`` does.

    Args:
        named: global name, parameter and spec of every parameter of this rank.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter, ParamSpec]], mesh: ParallelMesh) -> None:
        self._named, self._mesh = named, mesh

    @torch.no_grad()
    def average(self, is_held: Callable[[Tensor], bool]) -> None:
        """Replace each gradient by its mean over replicas; every replica calls this after its last backward.

        A gradient that is ``None`` counts as zero, and stays ``None`` if it is on all replicas.

        Args:
            is_held: function that returns True for a parameter of a distributed optimizer.
        """
        mesh = self._mesh
        if mesh.dp_cp.size == 1:
            return
        others = [(param, spec) for _, param, spec in self._named if param.requires_grad and not is_held(param)]
        if not others:
            return
        found = torch.tensor([float(param.grad is not None) for param, _ in others], device=mesh.rng.device)
        for (param, spec), exists in zip(others, all_reduce_max(found, mesh.dp_cp).tolist(), strict=True):
            if exists:
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad.to_dense()
                all_reduce_in_place(param.grad, mesh.dp_cp if spec.ep_dim is None else mesh.edp)
                param.grad.div_(mesh.dp_cp.size)
