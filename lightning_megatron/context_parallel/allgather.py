"""Context parallelism by all-gather: every rank gets all keys and values, and keeps its queries."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_megatron.context_parallel.zigzag import chunks_of, gather_context
from lightning_megatron.mesh import Axis
from lightning_megatron.ops.attention import attention_in_parts
from lightning_megatron.ops.core.attention_call import AttentionCall


def gathered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: AttentionCall,
    axis: Axis,
    core: Callable[..., Tensor] = attention_in_parts,
) -> Tensor:
    """Attention to the whole sequence, with the arguments of :class:`~.attention.ContextAttention`.

    One all-gather in forward and one reduce-scatter in backward. Every rank holds all keys and values, which are small
    if many query heads share them (https://arxiv.org/abs/2407.21783, section 3.3.2, does this for LLaMA 3).
    """
    both = gather_context(torch.cat((k, v), dim=-1), axis)  # [S, B, G, D + V]
    keys, values = both.split((k.shape[-1], v.shape[-1]), dim=-1)
    if not call.causal:
        return core(q, keys, values, call)
    length = q.shape[0] // 2
    outs = []
    for part, chunk in zip(q.split(length), chunks_of(axis.rank, axis.size), strict=True):
        first, end = chunk * length, (chunk + 1) * length
        key_mask = None if call.key_mask is None else call.key_mask[:, :end]
        outs.append(core(part, keys[:end], values[:end], call._replace(first_query=first, key_mask=key_mask)))
    return torch.cat(outs)
