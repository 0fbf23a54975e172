"""Padding of sequences and their shards over the context-parallel ranks, as a model needs them for its inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.context_parallel.zigzag import gather_context, split_context
from lightning_megatron.mesh import Axis


@dataclass(frozen=True)
class SequenceSharding:
    """Rule by which whole sequences, padded at their end to a multiple, become shards of context-parallel ranks."""

    axis: Axis
    multiple: int

    def padding(self, length: int) -> int:
        """Number of padding tokens behind a sequence of ``length`` tokens."""
        return -length % self.multiple

    def shard(self, x: Tensor, dim: int, value: float = 0) -> Tensor:
        """``[..., S, ...] -> [..., S/cp, ...]``: this rank's shard, after padding with ``value`` along ``dim``."""
        if padding := self.padding(x.shape[dim]):
            x = F.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, padding), value=value)
        return split_context(x, self.axis, dim)

    def gather(self, x: Tensor, length: int) -> Tensor:
        """``[S/cp, ...] -> [S, ...]``: the first ``length`` tokens of the whole sequence, on every rank."""
        return gather_context(x, self.axis)[:length]


class ShardedInputs(NamedTuple):
    """Inputs of a model on one context-parallel rank.

    Attributes:
        tokens: ``[S/cp, B]``.
        positions: ``[S/cp]``, or ``[S/cp, B]`` if each sequence has positions of its own.
        span: consecutive positions of the whole padded sequence; ``None`` if each sequence has its own.
        everywhere: positions ``[B, S]`` of all ranks; for consecutive ones only their end, without padding.
    """

    tokens: Tensor
    positions: Tensor
    span: range | None
    everywhere: int | Tensor


def shard_inputs(
    tokens: Tensor, position_ids: Tensor | None, sharding: SequenceSharding, first_position: int = 0
) -> ShardedInputs:
    """Pad tokens and positions, and take this rank's shard of them.

    Padding follows the sequence, so causal attention keeps the other tokens unchanged. Its position is 0, since higher
    ones could exceed the learned positions.

    Args:
        tokens: ``[B, S]``.
        position_ids: ``[B, S]``; ``None`` for consecutive positions.
        sharding: rule of padding and shards.
        first_position: position of the first token, for consecutive positions.
    """
    own = sharding.shard(tokens, 1).t()
    if position_ids is not None:
        return ShardedInputs(own, sharding.shard(position_ids.t(), 0), None, position_ids)
    end = first_position + tokens.shape[1]
    span = range(first_position, end + sharding.padding(tokens.shape[1]))
    positions = torch.arange(first_position, end, device=tokens.device)  # [S]
    return ShardedInputs(own, sharding.shard(positions, 0), span, end)
