"""Zigzag shards: the tokens of a sequence that each context-parallel rank holds.

The sequence is cut into ``2 R`` chunks of equal length, and rank ``r`` holds chunks ``r`` and ``2R - 1 - r``. Under
a causal mask an early token sees few others and a late one many; with one chunk from each end all ranks have equal work
(LLaMA 3, https://arxiv.org/abs/2407.21783, section 3.3.2).

Gradients follow from one rule: training minimizes the mean over ranks of each rank's loss. So a gradient is sent to
the rank that holds its tensor, and a value that every rank computes by itself needs no communication.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.comm.collectives import gather_sequence
from lightning_megatron.mesh import Axis


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    """Indices of the two chunks, of ``2 size``, that a rank holds."""
    return rank, 2 * size - 1 - rank


def split_context(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """``[..., S, ...] -> [..., S/R, ...]``: this rank's tokens of a tensor that is equal on all ranks.

    Raises:
        ValueError: if ``dim`` does not split into ``2 R`` chunks.
    """
    if axis.size == 1:
        return x
    if x.shape[dim] % (2 * axis.size):
        length, pieces = x.shape[dim], 2 * axis.size
        raise ValueError(f"dimension {dim} of length {length} does not split into 2 x {axis.name} = {pieces} chunks")
    return shard_of(x, axis.rank, axis.size, dim)


def shard_of(x: Tensor, rank: int, size: int, dim: int = 0) -> Tensor:
    """``[..., S, ...] -> [..., S/R, ...]``: the tokens of a rank."""
    chunk = x.shape[dim] // (2 * size)
    return torch.cat([x.narrow(dim, i * chunk, chunk) for i in chunks_of(rank, size)], dim)


def gather_context(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """``[..., S/R, ...] -> [..., S, ...]``: the whole sequence in its order, on every rank.

    Backward sums over the ranks and scatters.
    """
    if axis.size == 1:
        return x
    return in_order(gather_sequence(x.movedim(dim, 0), axis), axis.size).movedim(0, dim)


def in_order(shards: Tensor, size: int) -> Tensor:
    """``[S, ...] -> [S, ...]``: reorder from concatenated shards, by rank, to the order of the sequence."""
    early, late = shards.unflatten(0, (size, 2, -1)).unbind(1)
    return torch.cat((early.flatten(0, 1), late.flip(0).flatten(0, 1)))


def by_rank(sequence: Tensor, size: int) -> Tensor:
    """``[S, ...] -> [S, ...]``: reorder from the sequence to concatenated shards, inverse of :func:`in_order`."""
    early, late = sequence.unflatten(0, (2, size, -1)).unbind(0)
    return torch.stack((early, late.flip(0)), dim=1).flatten(0, 2)
