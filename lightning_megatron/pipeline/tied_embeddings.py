"""Parameters that several stages hold.

The embedding, where the output layer of the last stage is tied to the first's; and what a user's own module adds beside
the model, which every stage builds and only the last one uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.comm.collectives import all_reduce, start_all_reduce
from lightning_megatron.mesh import Axis, ParallelMesh
from lightning_megatron.recorder.form import Kind

Held = Mapping[str, tuple[int, ...]]
"""Parameters of a stage by name, with their local shapes."""


def sum_tied_gradients(gradients: Mapping[str, Tensor], ends: Axis) -> None:
    """Sum in place the gradients of parameters that both ends of a pipeline hold, so that the copies stay equal.

    Args:
        gradients: accumulated gradients of the tied parameters, by name.
        ends: first and last stage.
    """
    for _, gradient in sorted(gradients.items()):
        gradient.copy_(start_all_reduce(gradient, ends).wait())


def held_by_stages(own: Held, mesh: ParallelMesh) -> list[Held]:
    """What each pipeline rank holds, in their order. Every rank must call this.

    Args:
        own: parameters of this rank. Ranks that differ in no more than tp, cp or dp hold the same names.
        mesh: this rank's.
    """
    told: list[tuple[int, Held] | None] = [None] * mesh.world.size
    speaks = mesh.tp.rank == mesh.dp_cp.rank == 0
    said = (mesh.pp.rank, dict(own)) if speaks else None
    mesh.host.call(Kind.ALL_GATHER_OBJECT).run(dist.all_gather_object, told, said, group=mesh.host_group)
    return [held for _, held in sorted((entry for entry in told if entry is not None), key=lambda entry: entry[0])]


class SharedParameters:
    """Parameters under one name on several stages, whose gradients are summed so that the copies stay equal.

    Args:
        stages: what each of them holds (:func:`held_by_stages`).
        apart: names that something else takes care of.
        axis: the pipeline.

    Attributes:
        names: what is shared, in one order on all ranks.
        repeated: those that an earlier stage holds too: they do not count in a norm.
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
        """Give every stage the values of the first that holds them; every stage calls this.

        Args:
            params: what this stage holds, by name.
        """
        for name in self.names:
            own = params.get(name)
            device = next(iter(params.values())).device
            first = own is not None and name not in self.repeated
            value = own.float() if own is not None and first else torch.zeros(self._shapes[name], device=device)
            value = all_reduce(value, self._axis)
            if own is not None:
                own.copy_(value)

    def sum_gradients(self, gradients: Mapping[str, Tensor], device: torch.device) -> None:
        """Sum in place; every stage calls this, those that hold nothing too.

        Args:
            gradients: of those that this stage holds.
            device: where gradients live.
        """
        if not self.names:
            return
        zeros = (torch.zeros(self._shapes[name], device=device) for name in self.names if name not in gradients)
        parts = [gradients[name].float() if name in gradients else next(zeros) for name in self.names]
        total = all_reduce(torch.cat([part.flatten() for part in parts]), self._axis)
        for name, part in zip(self.names, total.split([part.numel() for part in parts]), strict=True):
            if name in gradients:
                gradients[name].copy_(part.view_as(gradients[name]))
