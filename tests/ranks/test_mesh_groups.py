"""The groups of a job that runs: who is in them, and with what arguments they were made."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.mesh import ParallelMesh

AXES = ("tp", "cp", "dp", "pp", "dp_cp", "embedding", "etp", "ep", "edp", "world")


def build_and_sum_ranks(layouts: list[ParallelLayout]) -> list[dict[str, Any]]:
    """For each layout: the sum of global ranks over each axis, and the arguments of every ``new_group``."""
    found = []
    for layout in layouts:
        with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
            mesh = ParallelMesh.create(layout, torch.device("cpu"), timeout=timedelta(seconds=300))
        sums = {}
        for name in AXES:
            axis = getattr(mesh, name)
            value = torch.tensor(float(mesh.rank))
            if axis.group is not None:
                dist.all_reduce(value, group=axis.group)
                assert dist.get_process_group_ranks(axis.group) == list(axis.ranks)
                assert dist.get_rank(axis.group) == axis.rank
            sums[name] = (value.item(), float(sum(axis.ranks)))
        calls = [(call.args, dict(call.kwargs)) for call in new_group.call_args_list]
        found.append({"sums": sums, "calls": calls, "device_mesh": describe(mesh)})
    return found


def describe(mesh: ParallelMesh) -> tuple[Any, ...]:
    torch_mesh = mesh.device_mesh("cpu")
    names = torch_mesh.mesh_dim_names
    assert names is not None
    return names, tuple(torch_mesh.mesh.shape), tuple(torch_mesh.get_coordinate() or ())


LAYOUTS = [
    ParallelLayout(tp=2, pp=2),
    ParallelLayout(tp=2, cp=2, ep=4, etp=1),
    ParallelLayout(tp=8),
    ParallelLayout(),
]


def test_groups_reach_the_ranks_of_their_axis_and_use_only_old_arguments(ranks):
    for rank, layouts in enumerate(ranks(8, build_and_sum_ranks, LAYOUTS)):
        for found in layouts:
            for got, expected in found["sums"].values():
                assert got == expected
            for args, kwargs in found["calls"]:
                assert len(args) == 1  # ranks
                assert set(kwargs) <= {"timeout", "backend"}
                assert kwargs["timeout"] == timedelta(seconds=300)
        names = [found["device_mesh"] for found in layouts]
        assert names[0] == (
            ("pipeline_parallel", "data_parallel", "tensor_parallel"),
            (2, 2, 2),
            (rank // 4, rank // 2 % 2, rank % 2),
        )
        assert names[2] == (("tensor_parallel",), (8,), (rank,))


def test_groups_with_the_same_members_are_built_once(ranks):
    """tp 2, pp 2 on 8 ranks: etp is tp, edp and dp x cp are dp, the ends of a pipeline of 2 are pp.

    So 4 groups of tp, 4 of dp and 4 of pp.
    """
    first, _, whole_world, data_only = ranks(8, build_and_sum_ranks, LAYOUTS)[0]
    assert len(first["calls"]) == 12
    assert whole_world["calls"] == data_only["calls"] == []
