"""Broadcast of initial values, so that all copies of a parameter are equal."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from lightning_megatron.comm.collectives import broadcast_in_place
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.params import ParamSpec


@torch.no_grad()
def broadcast_params(named_params: Iterable[tuple[str, nn.Parameter, ParamSpec]], mesh: ParallelMesh) -> None:
    """Broadcast every parameter from the first rank that holds it to its copies; every rank must call this.

    Copies are equal already in a model that is built after all processes have set the same seed. A model that a script
    builds earlier is initialized differently in each process; ``DistributedDataParallel`` broadcasts such a model too.
    """
    for _, param, spec in named_params:
        whole_over_tp = spec.tp_dim is None
        dense = (mesh.dp_cp, mesh.tp) if whole_over_tp else (mesh.dp_cp,)
        expert = (mesh.edp, mesh.etp) if whole_over_tp else (mesh.edp,)
        for axis in expert if spec.is_expert else dense:
            if axis.size > 1:
                broadcast_in_place(param.data, axis, 0)
