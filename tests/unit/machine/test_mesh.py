"""Ranks, groups and coordinates without processes: against Megatron's examples and a brute-force oracle."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Iterator
from itertools import product

import pytest
import torch

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.errors import ConfigError
from lightning_megatron.mesh import ParallelMesh, coordinate, dense_grid, expert_grid, rank_groups

AXES = {  # every axis of a mesh: its grid, and what varies along it
    "tp": ("dense", {"tp"}),
    "cp": ("dense", {"cp"}),
    "dp": ("dense", {"dp"}),
    "pp": ("dense", {"pp"}),
    "dp_cp": ("dense", {"dp", "cp"}),
    "etp": ("expert", {"etp"}),
    "ep": ("expert", {"ep"}),
    "edp": ("expert", {"edp"}),
    "world": ("dense", {"tp", "cp", "dp", "pp"}),
}


def layouts_up_to_64() -> Iterator[ParallelLayout]:
    for world, tp, pp, cp in product((1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64), (1, 2, 3, 8), (1, 2, 4), (1, 2, 3)):
        if world % (tp * pp * cp):
            continue
        folded = world // pp
        for ep, etp in product((1, 2, 8), (1, 2, tp)):
            if folded % (ep * etp) == 0:
                yield ParallelLayout(tp=tp, pp=pp, cp=cp, ep=ep, etp=etp).resolve(world)


def places_of_all_ranks(layout: ParallelLayout) -> dict[str, list[dict[str, int]]]:
    """Oracle: count ranks up in nested loops, the innermost axis the fastest."""
    world, pp = layout.world_size, layout.pp
    assert layout.etp is not None
    assert layout.dp is not None
    dense = [
        {"pp": p, "dp": d, "cp": c, "tp": t}
        for p in range(pp)
        for d in range(layout.dp)
        for c in range(layout.cp)
        for t in range(layout.tp)
    ]
    edp = world // (pp * layout.ep * layout.etp)
    expert = [
        {"pp": p, "edp": d, "ep": e, "etp": t}
        for p in range(pp)
        for d in range(edp)
        for e in range(layout.ep)
        for t in range(layout.etp)
    ]
    return {"dense": dense, "expert": expert}


def groups_by_brute_force(places: list[dict[str, int]], moving: set[str]) -> list[tuple[int, ...]]:
    """Oracle: ranks that agree on every other axis, in order of rank."""
    groups = defaultdict(list)
    for rank, place in enumerate(places):
        groups[tuple(value for name, value in place.items() if name not in moving)].append(rank)
    return sorted(tuple(group) for group in groups.values())


def test_groups_and_coordinates_equal_brute_force_on_many_layouts():
    count = 0
    for layout in layouts_up_to_64():
        grids = {"dense": dense_grid(layout), "expert": expert_grid(layout)}
        places = places_of_all_ranks(layout)
        for kind, grid in grids.items():
            assert [coordinate(grid, rank) for rank in range(layout.world_size)] == places[kind]
        for kind, moving in AXES.values():
            groups = rank_groups(grids[kind], list(moving))
            assert groups == groups_by_brute_force(places[kind], moving), (layout, moving)
        count += 1
    assert count > 300


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(tp=2, pp=2, cp=2, ep=4, etp=1).resolve(16),
        ParallelLayout(tp=4, pp=3, ep=2, etp=2).resolve(24),
        ParallelLayout(tp=2, cp=3, ep=2).resolve(12),
    ],
)
def test_each_rank_finds_itself_on_every_axis(layout):
    places = places_of_all_ranks(layout)
    for rank in range(layout.world_size):
        mesh = ParallelMesh(layout, rank)
        for name, (kind, moving) in AXES.items():
            axis = getattr(mesh, name)
            group = next(g for g in groups_by_brute_force(places[kind], moving) if rank in g)
            assert (axis.name, axis.size, axis.ranks) == (name, len(group), group)
            assert axis.ranks[axis.rank] == rank
            if len(moving) == 1:
                assert axis.rank == places[kind][rank][name]


def test_the_example_of_megatrons_documentation():
    """16 GPUs, tp 2, pp 4: the groups that megatron.core.parallel_state's docstring lists."""
    grid = dense_grid(ParallelLayout(tp=2, pp=4).resolve(16))
    assert rank_groups(grid, ["tp"]) == [(r, r + 1) for r in range(0, 16, 2)]
    assert rank_groups(grid, ["pp"]) == [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]
    assert rank_groups(grid, ["dp"]) == [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)]


def test_context_parallel_ranks_stand_between_tensor_and_data_parallel_ones():
    """The example of Megatron's RankGenerator for tp 2, cp 2, dp 2: cp groups skip tp, dp groups skip both."""
    grid = dense_grid(ParallelLayout(tp=2, cp=2).resolve(8))
    assert rank_groups(grid, ["cp"]) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert rank_groups(grid, ["dp"]) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert rank_groups(grid, ["dp", "cp"]) == [(0, 2, 4, 6), (1, 3, 5, 7)]


def test_experts_fold_over_the_ranks_of_tensor_and_data_parallelism():
    """tp 4 and etp 1 over 8 ranks: expert parallelism takes over tp's ranks (https://arxiv.org/abs/2504.14960)."""
    layout = ParallelLayout(tp=4, ep=8, etp=1).resolve(8)
    assert rank_groups(expert_grid(layout), ["ep"]) == [tuple(range(8))]
    assert rank_groups(dense_grid(layout), ["tp"]) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert layout.expert_data_parallel_size == 1


def test_the_ends_of_a_pipeline_are_its_first_and_last_stage():
    layout = ParallelLayout(tp=2, pp=4).resolve(16)
    ends = [ParallelMesh(layout, rank).embedding for rank in range(16)]
    assert [axis.ranks for axis in ends[:4]] == [(0, 12), (1, 13), (2, 14), (3, 15)]
    assert [(axis.ranks, axis.rank) for axis in ends[12:14]] == [((0, 12), 1), ((1, 13), 1)]
    assert [axis.ranks for axis in ends[4:12]] == [(rank,) for rank in range(4, 12)]
    assert ParallelMesh(ParallelLayout(tp=2).resolve(4), 3).embedding.size == 1


def test_an_axis_is_copied_as_a_handle_and_pickled_without_its_group():
    axis = ParallelMesh(ParallelLayout(tp=2).resolve(4), 3).tp
    assert copy.deepcopy(axis) is axis
    assert pickle.loads(pickle.dumps(axis)) == axis


def test_one_rank_is_a_mesh_of_axes_of_size_one():
    mesh = ParallelMesh.single()
    assert [getattr(mesh, name).size for name in AXES] == [1] * len(AXES)
    assert not mesh.is_distributed
    assert repr(mesh) == "ParallelMesh(rank 0/1)"
    assert (
        repr(ParallelMesh(ParallelLayout(tp=2, pp=2).resolve(8), 5)) == "ParallelMesh(rank 5/8: tp 1/2, dp 0/2, pp 1/2)"
    )


def test_a_layout_must_be_resolved_to_have_a_world():
    layout = ParallelLayout(tp=2)
    with pytest.raises(ValueError, match="dp is open until the layout is resolved"):
        _ = layout.world_size
    resolved = layout.resolve(8)
    assert (resolved.dp, resolved.etp, resolved.sequence_parallel, resolved.world_size) == (4, 2, True, 8)
    assert resolved.resolve(8) == resolved
    with pytest.raises(ConfigError, match="leaves 2 of the world size 4"):
        resolved.resolve(4)


def test_a_mesh_needs_no_processes_and_no_device():
    mesh = ParallelMesh(ParallelLayout(tp=8).resolve(64), rank=63)
    assert (mesh.tp.rank, mesh.dp.rank, mesh.tp.group) == (7, 7, None)
    assert mesh.rng.device == torch.device("cpu")


def test_a_copy_of_what_holds_a_mesh_stands_on_the_same_mesh():
    mesh = ParallelMesh.single()
    assert copy.deepcopy({"layer": mesh})["layer"] is mesh
