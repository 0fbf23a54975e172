"""Broadcast of parameters and buffers, so that all copies of them are equal."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lightning_megatron.comm.collectives import broadcast_in_place
from lightning_megatron.mesh import Axis, ParallelMesh
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


@torch.no_grad()
def broadcast_buffers(buffers: Iterable[Tensor], axis: Axis, source: int) -> None:
    """Broadcast buffers in place from position ``source``, all of one dtype at once; every rank must call this."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for buffer in buffers:
        by_dtype.setdefault(buffer.dtype, []).append(buffer)
    for alike in by_dtype.values():
        values = broadcast_in_place(torch.cat([buffer.flatten() for buffer in alike]), axis, source)
        if axis.rank != source:
            for buffer, part in zip(alike, values.split([buffer.numel() for buffer in alike]), strict=True):
                buffer.copy_(part.view_as(buffer))
