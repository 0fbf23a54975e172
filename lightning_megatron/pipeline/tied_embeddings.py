"""Parameters that several pipeline stages hold.

These are the embedding of the first stage, if the output layer of the last stage is tied to it; and parameters that a
user's module adds beside the model, which every stage builds and only the last one uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_megatron.comm.collectives import all_reduce, start_all_reduce
from lightning_megatron.comm.objects import all_gather_object
from lightning_megatron.mesh import Axis, ParallelMesh
from lightning_megatron.params import ParamSpec


class StageParameters(NamedTuple):
    """Parameters of one pipeline rank.

    Attributes:
        trained: local shapes of its trained parameters, by name.
        tied: names of its parameters that repeat those of another stage (a tied output layer).
    """

    trained: Mapping[str, tuple[int, ...]]
    tied: frozenset[str]

    @classmethod
    def of(cls, specs: Iterable[tuple[str, Tensor, ParamSpec]]) -> StageParameters:
        """Parameters of this rank, from :func:`~lightning_megatron.params.named_specs`."""
        specs = list(specs)
        trained = {name: tuple(param.shape) for name, param, _ in specs if param.requires_grad}
        return cls(trained, frozenset(spec.tied_with for _, _, spec in specs if spec.tied_with))


def gather_stages(own: StageParameters, mesh: ParallelMesh) -> list[StageParameters]:
    """Parameters of every pipeline rank, in the order of the ranks. Every rank must call this.

    Args:
        own: parameters of this rank. Ranks that differ only in tp, cp or dp hold the same names.
    """
    if mesh.pp.size == 1:
        return [own]
    is_source = mesh.tp.rank == mesh.dp_cp.rank == 0
    gathered = all_gather_object(mesh, (mesh.pp.rank, own) if is_source else None)
    by_rank = dict(entry for entry in gathered if entry is not None)
    return [by_rank[rank] for rank in range(mesh.pp.size)]


def sum_tied_gradients(gradients: Mapping[str, Tensor], ends: Axis) -> None:
    """Sum in place the gradients of parameters that both ends of a pipeline hold, so that the copies stay equal.

    Args:
        gradients: accumulated gradients of the tied parameters, by name.
        ends: axis of the first and the last stage (Megatron's embedding group).
    """
    for _, gradient in sorted(gradients.items()):
        gradient.copy_(start_all_reduce(gradient, ends).wait())


class SharedParameters:
    """Parameters under one name on several stages, whose gradients are summed so that the copies stay equal.

    Args:
        stages: parameters of every pipeline rank (:func:`gather_stages`).
        axis: the pipeline.

    Attributes:
        tied: names of tied parameters; :func:`sum_tied_gradients` sums their gradients.
        names: names of the other shared parameters, in the same order on all ranks.
        repeated: names that an earlier stage holds too; they do not count in a norm.
    """

    def __init__(self, stages: Sequence[StageParameters], axis: Axis) -> None:
        self.tied = frozenset(name for stage in stages for name in stage.tied)
        holders: dict[str, list[int]] = {}
        for rank, stage in enumerate(stages):
            for name in stage.trained.keys() - self.tied:
                holders.setdefault(name, []).append(rank)
        self.names = sorted(name for name, ranks in holders.items() if len(ranks) > 1)
        self.repeated = frozenset(name for name in self.names if holders[name][0] < axis.rank)
        self._shapes = {name: stages[holders[name][0]].trained[name] for name in self.names}
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
