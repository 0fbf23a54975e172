"""Checks of the groups of ranks against the nodes of a job."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from lightning_megatron import device as devices
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.errors import Problem, divisors, nearest_to
from lightning_megatron.mesh import uneven_groups

_ARGUMENTS = ("tp", "cp", "ep", "etp", "pp")


def node_problems(layout: ParallelLayout, nodes: int, devices_per_node: int, device: torch.device) -> list[Problem]:
    """Groups with different numbers of ranks on their nodes, if the device's collectives refuse such groups."""
    if nodes == 1 or not devices.collective_traits(device).needs_equal_nodes:
        return []
    ranks = nodes * devices_per_node
    if layout.problems(world_size=ranks):
        return []
    uneven = uneven_groups(layout.resolve(ranks), devices_per_node)
    found = []
    for name in _ARGUMENTS:
        size = getattr(layout, name)
        if name in uneven and size is not None:  # without an `etp`, that of `tp` is at fault
            valid = [n for n in divisors(ranks) if _is_even(_with(layout, name, n), ranks, devices_per_node)]
            reason = _reason(name, uneven[name], devices_per_node)
            found.append(Problem(name, size, reason, nearest_to(size, valid)))
    if uneven and not found:
        name, group = next(iter(uneven.items()))
        found.append(Problem("devices", devices_per_node, _reason(name, group, devices_per_node)))
    return found


def _with(layout: ParallelLayout, name: str, size: int) -> ParallelLayout:
    changed: dict[str, Any] = {name: size}
    return replace(layout, **changed)


def _is_even(layout: ParallelLayout, ranks: int, devices_per_node: int) -> bool:
    return not layout.problems(world_size=ranks) and not uneven_groups(layout.resolve(ranks), devices_per_node)


def _reason(name: str, group: tuple[int, ...], devices_per_node: int) -> str:
    counts = Counter(rank // devices_per_node for rank in group)
    shared = ", ".join(f"{count} on node {node}" for node, count in sorted(counts.items()))
    return (
        f"the {name} group of ranks {', '.join(map(str, group))} has {shared}: this device's collectives need equally "
        "many ranks of a group on each node that it touches"
    )
