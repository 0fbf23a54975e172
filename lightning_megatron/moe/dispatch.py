"""Dispatch of tokens to the ranks that hold their experts, and combination of the results.

The ranks of the ``etp x ep`` axis together hold every expert once: ``ep`` distributes whole experts, ``etp`` shards
each of them. A token visits all ``etp`` ranks of its expert, and their partial results are summed
("parallel folding", https://arxiv.org/abs/2504.14960). Everything is differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightning_megatron.comm.collectives import all_to_all, all_to_all_no_grad, gather_sequence, reduce_scatter_sequence
from lightning_megatron.mesh import Axis, ParallelMesh
from lightning_megatron.moe.capacity import permute_by_expert


class Experts(Protocol):
    """Experts of one rank."""

    def grouped(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """``[n, H] -> [n, H]``, rows sorted by expert."""
        ...

    def batched(self, x: Tensor) -> Tensor:
        """``[E/ep, n, H] -> [E/ep, n, H]``."""
        ...


class ExpertGrid:
    """Assignment of ``E`` experts to the ranks of an axis."""

    def __init__(self, num_experts: int, mesh: ParallelMesh) -> None:
        self.axis: Axis = mesh.etp_ep
        self.num_experts = num_experts
        self.ep, self.etp = mesh.ep.size, mesh.etp.size
        self.local = num_experts // self.ep

    def copies(self, x: Tensor) -> Tensor:
        """``[ep, ...] -> [ep etp, ...]``: a copy for each rank that holds a slice of the same experts."""
        return x if self.etp == 1 else x.repeat_interleave(self.etp, 0)


def allgather(
    x: Tensor, experts: Tensor, weights: Tensor, compute: Callable[[Tensor, Tensor, Tensor], Tensor], axis: Axis
) -> Tensor:
    """Gather all tokens on all ranks, compute the local experts' outputs, and reduce-scatter their sums.

    Args:
        x: ``[T, H]``, the same number of tokens on every rank.
        experts: ``[T, k]`` ids.
        weights: ``[T, k]``.
        compute: method ``routed`` of the local experts.
        axis: ``etp x ep`` ranks.
    """
    everything = (gather_sequence(part, axis) for part in (x, experts, weights))  # [R T, H], [R T, k], [R T, k]
    return reduce_scatter_sequence(compute(*everything), axis)


def alltoall(x: Tensor, experts: Tensor, weights: Tensor, compute: Experts, grid: ExpertGrid) -> Tensor:
    """Send each token to the ranks of its experts and back, one row per choice.

    Each call has one host synchronization, for the numbers of rows.

    Args:
        x: ``[T, H]``; the number of tokens may differ between ranks, and be 0.
        experts: ``[T, k]`` ids; ``E`` for a dropped choice.
        weights: ``[T, k]``.
        compute: experts of this rank.
        grid: assignment of experts to ranks.
    """
    topk, local = experts.shape[1], grid.local
    order, counts, _ = permute_by_expert(experts, grid.num_experts)  # [T k], [E]
    sent = grid.copies(counts.view(grid.ep, local))  # [R, E/ep]: rows for each expert of each rank
    counts_of_ranks = torch.stack((sent, all_to_all_no_grad(sent, grid.axis)))  # [2, R, E/ep]: sent, received
    sent_counts, received = counts_of_ranks.tolist()  # the only wait for the device
    sent_rows = [sum(row) for row in sent_counts]
    blocks = sent_rows[:: grid.etp]
    rows = _repeated(order[: sum(blocks)] // topk, blocks, grid.etp)  # token of each row to send
    received_rows = [sum(row) for row in received]
    arrived = all_to_all(x.index_select(0, rows), grid.axis, sent_rows, received_rows)  # [n, H], sorted by rank

    by_rank = [received[r][e] for r in range(grid.axis.size) for e in range(local)]
    by_expert = [received[r][e] for e in range(local) for r in range(grid.axis.size)]
    ours = _transposed(arrived, by_rank, local)  # [n, H], sorted by expert
    out = compute.grouped(ours, [sum(row[e] for row in received) for e in range(local)])
    back = all_to_all(_transposed(out, by_expert, grid.axis.size), grid.axis, received_rows, sent_rows)
    return _combined(_summed_copies(back, blocks, grid.etp), order, weights, x)


def padded_alltoall(
    x: Tensor, experts: Tensor, weights: Tensor, compute: Experts, grid: ExpertGrid, capacity: int
) -> Tensor:
    """As :func:`alltoall`, with ``C`` rows from each rank for each expert: no shape depends on the routing.

    No expert has more choices than the capacity ``C``.
    """
    (tokens, topk), hidden = experts.shape, x.shape[1]
    ranks, local = grid.axis.size, grid.local
    order, _, place = permute_by_expert(experts, grid.num_experts)
    target = experts.flatten()[order]
    slots = grid.num_experts * capacity
    slot = torch.where(target < grid.num_experts, target * capacity + place, slots)  # [T k]
    # An empty slot takes the row of zeros that follows the tokens, a dropped choice the row after the slots.
    source = torch.full((slots + 1,), tokens, device=x.device).scatter_(0, slot, order // topk)[:slots]
    filled = _with_zeros(x).index_select(0, source).view(grid.ep, local * capacity, hidden)  # [ep, E/ep C, H]
    arrived = all_to_all(grid.copies(filled), grid.axis).view(ranks, local, capacity, hidden)  # [R, E/ep, C, H]
    out = compute.batched(arrived.transpose(0, 1).reshape(local, ranks * capacity, hidden))  # [E/ep, R C, H]
    back = all_to_all(out.view(local, ranks, capacity, hidden).transpose(0, 1).contiguous(), grid.axis)
    partial = back.view(grid.ep, grid.etp, local * capacity, hidden).sum(1) if grid.etp > 1 else back
    rows = _with_zeros(partial.reshape(slots, hidden))  # [E C + 1, H]
    slot_of_choice = torch.empty_like(slot).scatter_(0, order, slot)
    return _weighted(rows.index_select(0, slot_of_choice), weights, x)


def _repeated(rows: Tensor, blocks: Sequence[int], times: int) -> Tensor:
    """Rows with every block of consecutive rows repeated ``times`` times."""
    if times == 1:
        return rows
    return torch.cat([block for part in rows.split(list(blocks)) for block in (part,) * times])


def _summed_copies(rows: Tensor, blocks: Sequence[int], times: int) -> Tensor:
    """Inverse of :func:`_repeated`: the sum of each block's copies."""
    if times == 1:
        return rows
    parts = rows.split([size * times for size in blocks])
    return torch.cat([part.view(times, size, rows.shape[1]).sum(0) for part, size in zip(parts, blocks, strict=True)])


def _transposed(rows: Tensor, sizes: Sequence[int], columns: int) -> Tensor:
    """Transpose of a matrix of row blocks with ``columns`` columns."""
    if columns in (1, len(sizes)):
        return rows
    blocks = rows.split(list(sizes))
    return torch.cat([block for column in range(columns) for block in blocks[column::columns]])


def _with_zeros(x: Tensor) -> Tensor:
    return torch.cat((x, x.new_zeros(1, x.shape[1])))


def _combined(rows: Tensor, order: Tensor, weights: Tensor, x: Tensor) -> Tensor:
    """Tokens ``[T, H]`` from one row per choice, in ``order``; dropped choices at its end have no row and count 0."""
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return _weighted(_with_zeros(rows).index_select(0, place.clamp_(max=rows.shape[0])), weights, x)


def _weighted(choices: Tensor, weights: Tensor, x: Tensor) -> Tensor:
    """``[T k, H]`` and ``[T, k]`` to ``[T, H]``."""
    return (choices.view(*weights.shape, x.shape[1]) * weights.unsqueeze(-1)).sum(1).to(x.dtype)
