"""Context parallelism by all-gather: every rank gets all keys and values, and keeps its queries."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.config.score_rule import PLAIN, ScoreRule
from lightning_megatron.context_parallel.zigzag import chunks_of, gather_context
from lightning_megatron.documents import Documents
from lightning_megatron.mesh import Axis
from lightning_megatron.ops.attention import attention_in_parts


def gathered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: Axis,
    core: Callable[..., Tensor] = attention_in_parts,
    *,
    causal: bool = True,
    dropout: float = 0.0,
    key_mask: Tensor | None = None,
    rule: ScoreRule = PLAIN,
    sinks: Tensor | None = None,
    documents: Documents | None = None,
) -> Tensor:
    """Attention to the whole sequence, with the arguments of :class:`~.attention.ContextAttention`.

    One all-gather in forward and one reduce-scatter in backward. Every rank holds all keys and values, which are small
    if many query heads share them (https://arxiv.org/abs/2407.21783, section 3.3.2, does this for LLaMA 3).
    """
    both = gather_context(torch.cat((k, v), dim=-1), axis)  # [S, B, G, D + V]
    keys, values = both.split((k.shape[-1], v.shape[-1]), dim=-1)
    # What is given with documents is ``ops.attention.document_attention``.
    attend = core if documents is None else partial(core, documents=documents)
    # Some kernels do not accept a key mask.
    masked: dict[str, Any] = {} if key_mask is None else {"key_mask": key_mask}
    if not causal:
        return attend(q, keys, values, causal=False, dropout=dropout, rule=rule, sinks=sinks, **masked)
    length = q.shape[0] // 2
    outs = []
    for part, chunk in zip(q.split(length), chunks_of(axis.rank, axis.size), strict=True):
        first, end = chunk * length, (chunk + 1) * length
        how: dict[str, Any] = {"dropout": dropout, "first_query": first, "rule": rule, "sinks": sinks}
        if key_mask is not None:
            how["key_mask"] = key_mask[:, :end]
        outs.append(attend(part, keys[:end], values[:end], causal=True, **how))
    return torch.cat(outs)
