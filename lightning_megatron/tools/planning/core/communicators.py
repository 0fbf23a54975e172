"""Communicators of a rank: one for each group of ranks that it sends tensors in, and one for each neighbour."""

from __future__ import annotations

from lightning_megatron.config.layout import ParallelLayout


def num_communicators(layout: ParallelLayout) -> int:
    """Communicators of the rank that has most: groups with different members, and pairs of a pipeline and of a ring.

    A backend makes a pair of its own for messages from one rank to another.
    """
    dense = {"tp": layout.tp, "cp": layout.cp, "dp": layout.data_parallel_size, "pp": layout.pp}
    ends, experts = layout.expert_tensor_parallel_size, layout.expert_data_parallel_size
    folded = {"etp": ends, "ep": layout.ep, "edp": experts}
    groups = {_of_rank_0(dense, axes) for axes in (*((name,) for name in dense), ("dp", "cp"), tuple(dense))}
    groups |= {_of_rank_0(folded, axes) for axes in (*((name,) for name in folded), ("etp", "ep"))}
    number = sum(len(ranks) > 1 for ranks in groups) + (layout.pp > 2)  # first and last stage: tied embeddings
    in_ring = layout.cp if layout.cp_comm_type == "p2p" else 1
    return number + min(2, layout.pp - 1) + min(2, in_ring - 1)


def _of_rank_0(grid: dict[str, int], axes: tuple[str, ...]) -> frozenset[int]:
    """Ranks of the group of rank 0 in which ``axes`` vary; the first axis of ``grid`` is the fastest."""
    ranks, stride = {0}, 1
    for name, size in grid.items():
        if name in axes:
            ranks = {rank + stride * place for rank in ranks for place in range(size)}
        stride *= size
    return frozenset(ranks)
