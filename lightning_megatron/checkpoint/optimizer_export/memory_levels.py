"""Memory levels: plans by which ranks collect optimizer state for one file, which decide the peak of host memory.

Ranks that hold shards of the same slice of the model (over ``dp`` and ``cp``, of experts over ``edp``) are one group.
The first rank of a node collects groups for the node. The names of the levels are those of Intel's Megatron for Gaudi.
Pure functions, without processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.errors import ConfigError, Problem, nearest_names
from lightning_megatron.mesh import dense_grid, expert_grid, rank_groups

MEMORY_LEVELS = {
    "parallel_node_0": "all groups at once, on the first node",
    "parallel_multi_node": "all groups at once, shared out over the nodes",
    "serial_per_node": "on each node one group after the other",
    "serial_per_dp_groups": "one group after the other in the whole job",
}


@dataclass(frozen=True)
class StateHolders:
    """Ranks that together hold the state of one slice, each part of it once or more often.

    Attributes:
        of_experts: True for the state of experts, False for all other state.
        ranks: members of the group.
        collector: rank that collects all of it in its host memory.
    """

    of_experts: bool
    ranks: tuple[int, ...]
    collector: int


def collecting_steps(layout: ParallelLayout, ranks_per_node: int, level: str) -> list[list[StateHolders]]:
    """The groups of a job in steps; groups of one step are in host memory at the same time.

    Raises:
        ConfigError: for a level that is not in ``MEMORY_LEVELS``.
    """
    if level not in MEMORY_LEVELS:
        near = nearest_names(level, list(MEMORY_LEVELS))
        raise ConfigError([Problem("memory_level", level, "no such level", near)])
    dense = rank_groups(dense_grid(layout), ["cp", "dp"])
    experts = rank_groups(expert_grid(layout), ["edp"])
    groups = [
        StateHolders(of_experts, ranks, node * ranks_per_node)
        for of_experts, kind in ((False, dense), (True, experts))
        for ranks, node in zip(kind, _nodes(kind, ranks_per_node, level), strict=True)
    ]
    if level in ("parallel_node_0", "parallel_multi_node"):
        return [groups]
    if level == "serial_per_dp_groups":
        return [[group] for group in groups]
    queues = [[group for group in groups if group.collector == c] for c in sorted({g.collector for g in groups})]
    return [[group for group in step if group is not None] for step in zip_longest(*queues)]


def _nodes(groups: Sequence[tuple[int, ...]], ranks_per_node: int, level: str) -> list[int]:
    """The node of each group: the first that holds one of its ranks and has fewer groups than its share."""
    if level == "parallel_node_0":
        return [0] * len(groups)
    nodes = max(max(ranks) for ranks in groups) // ranks_per_node + 1
    share, taken, found = -(-len(groups) // nodes), [0] * nodes, []
    for ranks in groups:
        homes = sorted({rank // ranks_per_node for rank in ranks})
        node = next((home for home in homes if taken[home] < share), homes[0])
        taken[node] += 1
        found.append(node)
    return found
