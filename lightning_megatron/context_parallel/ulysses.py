"""Context parallelism by heads (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509).

An all-to-all turns a sequence shard with all heads into the whole sequence with a shard of the heads. Attention is then
that of one rank, with any fused kernel and with dropout. A second all-to-all restores the sequence shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_megatron.comm.collectives import all_to_all
from lightning_megatron.context_parallel.zigzag import by_rank, in_order
from lightning_megatron.mesh import Axis
from lightning_megatron.ops.attention import attention


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: Axis,
    core: Callable[..., Tensor] = attention,
    *,
    causal: bool = True,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of this rank's queries to the whole sequence.

    If the key/value heads do not split over the ranks, each is repeated as often as needed; the query heads must split.

    Args:
        q: ``[S/R, B, N, D]``, this rank's zigzag shard.
        k: ``[S/R, B, G, D]``.
        v: ``[S/R, B, G, D]``.
        axis: context-parallel ranks.
        core: attention on one rank.
        causal: True if a token sees only the tokens before it and itself.
        dropout: probability of dropping an attention weight.

    Returns:
        ``[S/R, B, N, D]``.
    """
    repeats = axis.size // math.gcd(k.shape[2], axis.size)
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, dim=2), v.repeat_interleave(repeats, dim=2)
    # Queries, keys and values of a rank's heads side by side, so that one message carries them.
    parts = [x.unflatten(2, (axis.size, -1)) for x in (q, k, v)]  # [S/R, B, R, heads/R, D]
    heads = [part.shape[3] for part in parts]
    packed = torch.cat(parts, dim=3).movedim(2, 0).flatten(0, 1)
    whole = in_order(all_to_all(packed, axis), axis.size)
    out = core(*whole.split(heads, dim=2), causal=causal, dropout=dropout)
    back = all_to_all(by_rank(out, axis.size), axis)
    return back.unflatten(0, (axis.size, -1)).movedim(0, 2).flatten(2, 3)
