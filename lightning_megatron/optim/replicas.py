"""Check that parameters replicated over tensor-parallel ranks have equal gradients.

These gradients are not reduced over tp: they are equal because all ranks compute the same. A user's head that reads a
shard of the sequence breaks this, and its copies would silently drift apart. So the first steps compare two numbers of
each gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.comm.collectives import all_gather, all_reduce_max
from lightning_megatron.comm.objects import all_gather_object
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.optim.clip import local_norm
from lightning_megatron.optim.zero import ShardedOptimizer
from lightning_megatron.params import ParamSpec

STEPS = 3
TOLERANCE = 1e-2
"""Relative tolerance: far above the effect of another order of summation, far below the effect of other tokens."""


class ReplicaError(RuntimeError):
    """Ranks that hold a parameter whole have computed different gradients of it."""


class ReplicaCheck:
    """Compares gradients over tensor-parallel ranks in the first steps, and costs nothing afterwards."""

    def __init__(self, sharded: ShardedOptimizer, mesh: ParallelMesh) -> None:
        self._sharded, self._mesh = sharded, mesh
        self._left = STEPS if mesh.tp.size > 1 else 0

    def __call__(self) -> None:
        """Compare gradients, between their reduction and the step. Every rank must call this.

        Raises:
            ReplicaError: on all ranks, naming every parameter whose gradients differ anywhere.
        """
        if not self._left:
            return
        self._left -= 1
        faults = self._faults(self._sharded.gradients_of(_is_replicated))
        if not all_reduce_max(torch.tensor(float(bool(faults)), device=self._mesh.rng.device), self._mesh.world).item():
            return
        names = ", ".join(sorted({name for found in all_gather_object(self._mesh, faults) for name in found}))
        raise ReplicaError(
            f"gradients of {names} differ between tensor-parallel ranks, each of which holds these parameters whole:"
            " their copies would drift apart. All tp ranks must compute the same with them: take hidden states from"
            " module.hidden(batch), which are whole on every rank; an activation inside the model may be a shard of the"
            " sequence. For a layer whose ranks read parts of the sequence on purpose, set grad_sum_over_tp in its"
            " param_specs"
        )

    def _faults(self, gradients: list[tuple[str, Tensor]]) -> list[str]:
        if not gradients:
            return []
        sketches = torch.stack([_sketch(grad) for _, grad in gradients])
        over_ranks = all_gather(sketches[None], self._mesh.tp)  # [R, gradients, 2]
        apart = (over_ranks.amax(0) - over_ranks.amin(0)).amax(-1)
        differs = (apart > TOLERANCE * over_ranks[..., 0].amax(0)).tolist()  # False for a NaN
        return [name for (name, _), fault in zip(gradients, differs, strict=True) if fault]


def _is_replicated(spec: ParamSpec) -> bool:
    return spec.tp_dim is None and not spec.is_expert and not spec.grad_sum_over_tp


def _sketch(grad: Tensor) -> Tensor:
    """Norm of a gradient and its component along a fixed direction: for different tokens at least one differs."""
    direction = torch.arange(grad.numel(), dtype=torch.float32, device=grad.device).cos_()
    return torch.stack([local_norm(grad).float(), grad.float().dot(direction)])
