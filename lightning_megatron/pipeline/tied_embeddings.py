"""Parameters that several pipeline stages hold.

These are the embedding of the first stage, if the output layer of the last stage is tied to it; and parameters that a
user's module adds beside the model, which every stage builds and only the last one uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_megatron.comm.collectives import all_reduce, start_all_reduce
from lightning_megatron.comm.objects import all_gather_object
from lightning_megatron.mesh import Axis, ParallelMesh

Held = Mapping[str, tuple[int, ...]]
"""Local shapes of a stage's parameters, by name."""


def sum_tied_gradients(gradients: Mapping[str, Tensor], ends: Axis) -> None:
    """Sum in place the gradients of parameters that both ends of a pipeline hold, so that the copies stay equal.

    Args:
        gradients: accumulated gradients of the tied parameters, by name.
        ends: axis of the first and the last stage (Megatron's embedding group).
    """
    for _, gradient in sorted(gradients.items()):
        gradient.copy_(start_all_reduce(gradient, ends).wait())


def tied_names(own: Sequence[str], mesh: ParallelMesh) -> frozenset[str]:
    """Names of the tied parameters that both the first and the last stage hold. Every rank must call this."""
    if mesh.pp.size == 1:
        return frozenset(own)
    if mesh.rehearsed is not None:
        return mesh.rehearsed.tied
    return frozenset(name for names in all_gather_object(mesh, list(own)) for name in names)


def held_by_stages(own: Held, mesh: ParallelMesh) -> list[Held]:
    """Parameters of every pipeline rank, in the order of the ranks. Every rank must call this.

    Args:
        own: parameters of this rank. Ranks that differ only in tp, cp or dp hold the same names.
    """
    if mesh.rehearsed is not None:
        return list(mesh.rehearsed.held)
    is_source = mesh.tp.rank == mesh.dp_cp.rank == 0
    gathered = all_gather_object(mesh, (mesh.pp.rank, dict(own)) if is_source else None)
    return [held for _, held in sorted((entry for entry in gathered if entry is not None), key=lambda entry: entry[0])]


class SharedParameters:
    """Parameters under one name on several stages, whose gradients are summed so that the copies stay equal.

    Args:
        stages: parameters of every stage (:func:`held_by_stages`).
        apart: names to leave out, because their gradients are summed elsewhere.
        axis: the pipeline.

    Attributes:
        names: names of the shared parameters, in the same order on all ranks.
        repeated: names that an earlier stage holds too; they do not count in a norm.
    """

    def __init__(self, stages: Sequence[Held], apart: frozenset[str], axis: Axis) -> None:
        holders: dict[str, list[int]] = {}
        for rank, held in enumerate(stages):
            for name in held.keys() - apart:
                holders.setdefault(name, []).append(rank)
        self.names = sorted(name for name, ranks in holders.items() if len(ranks) > 1)
        self.repeated = frozenset(name for name in self.names if holders[name][0] < axis.rank)
        self._shapes = {name: stages[holders[name][0]][name] for name in self.names}
        self._axis = axis

    @torch.no_grad()
    def share_values(self, params: Mapping[str, Tensor]) -> None:
        """Copy the values of the first stage that holds them to all others; every stage calls this."""
        for name in self.names:
            own = params.get(name)
            device = next(iter(params.values())).device
            first = own is not None and name not in self.repeated
            value = own.float() if own is not None and first else torch.zeros(self._shapes[name], device=device)
            value = all_reduce(value, self._axis)
            if own is not None:
                own.copy_(value)

    def sum_gradients(self, gradients: Mapping[str, Tensor], device: torch.device) -> None:
        """Sum gradients over the stages in place; every stage calls this, even one without a shared parameter."""
        if not self.names:
            return
        zeros = (torch.zeros(self._shapes[name], device=device) for name in self.names if name not in gradients)
        parts = [gradients[name].float() if name in gradients else next(zeros) for name in self.names]
        total = all_reduce(torch.cat([part.flatten() for part in parts]), self._axis)
        for name, part in zip(self.names, total.split([part.numel() for part in parts]), strict=True):
            if name in gradients:
                gradients[name].copy_(part.view_as(gradients[name]))
