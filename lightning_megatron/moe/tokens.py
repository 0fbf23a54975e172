"""Tokens that visit experts, and tokens that count in the statistics of routers."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class RoutedTokens(NamedTuple):
    """Tokens of one forward on a rank, in whose sequences some are padding.

    Attributes:
        present: bool ``[S, B]``, False for tokens that visit no expert.
        counted: bool ``[S, B]``, False for tokens that count neither in the losses of a router nor in its load.
        lengths: ``[B]``, counted tokens of each sequence, on all ranks that share it.
    """

    present: Tensor
    counted: Tensor
    lengths: Tensor

    @classmethod
    def whole(cls, x: Tensor, ranks: int) -> RoutedTokens:
        """All tokens of ``[S, B, ...]``, shards of sequences over ``ranks`` ranks."""
        every = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        return cls(every, every, torch.full(x.shape[1:2], x.shape[0] * ranks, device=x.device))


def up_to_the_last(kept: Tensor, ends: Tensor | None) -> Tensor:
    """Tokens of each document up to its last one that is kept, bool ``[B, S]``.

    Attention is causal: what is kept depends on no later token of the document, so these are as good as padding.

    Args:
        kept: bool ``[B, S]``, True for tokens that are no padding for sure.
        ends: ``[B, S]``, end of each token's document, 0 for padding; ``None`` for whole sequences.
    """
    later = F.pad(kept.flip(1).cumsum(1).flip(1), (0, 1))  # [B, S + 1], kept tokens from each one on
    return later[:, :-1] > (0 if ends is None else later.gather(1, ends))
