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
from lightning_megatron.ops.core.attention_call import AttentionCall


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: AttentionCall,
    axis: Axis,
    core: Callable[..., Tensor] = attention,
) -> Tensor:
    """Attention to the whole sequence, with the arguments of :class:`~.attention.ContextAttention`.

    If the key/value heads do not split over the ranks, each is repeated as often as needed; the query heads must split.
    """
    repeats = axis.size // math.gcd(k.shape[2], axis.size)
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, dim=2), v.repeat_interleave(repeats, dim=2)
    # Queries, keys and values of a rank's heads side by side, so that one message carries them.
    parts = [x.unflatten(2, (axis.size, -1)) for x in (q, k, v)]  # [S/R, B, R, heads/R, D]
    shapes = [part.shape[3:] for part in parts]
    packed = torch.cat([part.flatten(3) for part in parts], dim=3).movedim(2, 0).flatten(0, 1)
    whole = in_order(all_to_all(packed, axis), axis.size)  # [S, B, features of all heads]
    own_parts = whole.split([shape.numel() for shape in shapes], dim=2)
    own_heads = (part.unflatten(2, shape) for part, shape in zip(own_parts, shapes, strict=True))
    sinks = None if call.sinks is None else call.sinks.unflatten(0, (axis.size, -1))[axis.rank]
    out = core(*own_heads, call._replace(rule=call.rule.of_heads(axis.rank, axis.size), sinks=sinks))
    back = all_to_all(by_rank(out, axis.size), axis)
    return back.unflatten(0, (axis.size, -1)).movedim(0, 2).flatten(2, 3)
