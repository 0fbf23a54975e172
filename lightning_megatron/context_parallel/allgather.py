"""Context parallelism by all-gather: every rank gets all keys and values, and keeps its queries."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_megatron.context_parallel.zigzag import chunks_of, gather_context
from lightning_megatron.mesh import Axis
from lightning_megatron.ops.attention import attention
from lightning_megatron.ops.blockwise_attention import blockwise_attention


def gathered_attention(
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

    One all-gather in forward and one reduce-scatter in backward. Every rank holds all keys and values, which is little
    where many query heads share them (https://arxiv.org/abs/2407.21783, section 3.3.2, does this for LLaMA 3).

    Args:
        q: ``[S/R, B, N, D]``, this rank's zigzag shard.
        k: ``[S/R, B, G, D]``.
        v: ``[S/R, B, G, D]``.
        axis: context-parallel ranks.
        core: attention on one rank; used with dropout only.
        causal: True if a token sees only the tokens before it and itself.
        dropout: probability of dropping an attention weight.

    Returns:
        ``[S/R, B, N, D]``.
    """
    keys, values = gather_context(torch.cat((k, v), dim=-1), axis).chunk(2, dim=-1)  # [S, B, G, D]
    if not causal:
        return _attention(core, q, keys, values, False, dropout, 0)
    length = q.shape[0] // 2
    outs = []
    for part, chunk in zip(q.split(length), chunks_of(axis.rank, axis.size), strict=True):
        first, end = chunk * length, (chunk + 1) * length
        outs.append(_attention(core, part, keys[:end], values[:end], True, dropout, first))
    return torch.cat(outs)


def _attention(
    core: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, causal: bool, dropout: float, first_query: int
) -> Tensor:
    if dropout:
        return core(q, k, v, causal=causal, dropout=dropout, first_query=first_query)
    return blockwise_attention(q, k, v, causal=causal, first_query=first_query)
