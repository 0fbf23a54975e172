"""Groups over nodes: which layouts give a group unequally many ranks on the nodes that it touches."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

import pytest
import torch

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.device import collective_traits
from lightning_megatron.lightning.validation.nodes import node_problems
from lightning_megatron.mesh import dense_grid, rank_groups, uneven_groups

GAUDI = torch.device("hpu", 0)


@pytest.mark.parametrize(
    ("sizes", "per_node", "nodes", "uneven"),
    [
        ({"tp": 8}, 8, 2, {}),
        ({"tp": 4, "pp": 2}, 8, 2, {}),
        ({"tp": 4}, 6, 2, {"dp": (0, 4, 8)}),  # the tp groups are even: 4 ranks, or 2 on each of two nodes
        ({"tp": 3}, 8, 3, {"tp": (6, 7, 8), "dp": (0, 3, 6, 9, 12, 15, 18, 21)}),
        ({"pp": 3}, 8, 3, {}),
        ({"tp": 6}, 8, 3, {"tp": (6, 7, 8, 9, 10, 11), "dp": (0, 6, 12, 18)}),
    ],
)
def test_groups_with_unequal_shares_of_nodes(
    sizes: dict[str, int], per_node: int, nodes: int, uneven: dict[str, tuple[int, ...]]
) -> None:
    found = uneven_groups(ParallelLayout(**sizes).resolve(per_node * nodes), per_node)
    assert {name: found.get(name) for name in uneven} == uneven
    assert bool(found) == bool(uneven)


def test_every_group_of_an_even_layout_is_even() -> None:
    layout = ParallelLayout(tp=2, cp=2, pp=2).resolve(32)
    assert not uneven_groups(layout, 8)
    for name in ("tp", "cp", "dp", "pp"):
        for ranks in rank_groups(dense_grid(layout), [name]):
            assert len(set(Counter(rank // 8 for rank in ranks).values())) == 1


def test_an_uneven_layout_is_refused_on_gaudi_with_the_nearest_valid_sizes() -> None:
    (problem,) = node_problems(ParallelLayout(tp=3), 3, 8, GAUDI)
    assert (problem.argument, problem.value) == ("tp", 3)
    assert "ranks 6, 7, 8 has 2 on node 0, 1 on node 1" in str(problem)
    assert problem.nearest == (2, 4, 1)
    for valid in problem.nearest:
        assert isinstance(valid, int)
        assert not node_problems(ParallelLayout(tp=valid), 3, 8, GAUDI)
    several = node_problems(ParallelLayout(tp=3, cp=3), 9, 8, GAUDI)
    assert {"tp", "cp"} <= {problem.argument for problem in several}


def test_other_devices_and_single_nodes_take_any_layout() -> None:
    assert not node_problems(ParallelLayout(tp=3), 3, 8, torch.device("cpu"))
    assert not node_problems(ParallelLayout(tp=3), 1, 24, GAUDI)
    assert not node_problems(ParallelLayout(tp=5), 3, 8, GAUDI)  # another check names that fault


def test_ranks_wait_longer_for_each_other_where_one_may_compile() -> None:
    assert collective_traits(GAUDI).timeout == timedelta(minutes=60)
    assert collective_traits(torch.device("cpu")).timeout == timedelta(minutes=10)
