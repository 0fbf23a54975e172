"""Core attention: softmax(q k^T) v for the heads of one rank."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def attention_reference(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, first_query: int = 0) -> Tensor:
    """Attention in plain torch, softmax in fp32: the meaning of :func:`attention` without dropout."""
    repeats = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(repeats, dim=2), v.repeat_interleave(repeats, dim=2)
    scores = torch.einsum("sbnd,tbnd->bnst", q, k).float() / math.sqrt(q.shape[-1])
    if causal:
        queries = torch.arange(q.shape[0], device=q.device) + first_query
        hidden = torch.arange(k.shape[0], device=q.device)[None, :] > queries[:, None]
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("bnst,tbnd->sbnd", scores.softmax(-1).to(v.dtype), v)


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, dropout: float = 0.0, first_query: int = 0) -> Tensor:
    """Scaled dot-product attention with grouped key/value heads (https://arxiv.org/abs/2305.13245).

    Args:
        q: ``[S, B, N, D]``.
        k: ``[T, B, G, D]``, ``N`` a multiple of ``G``; head ``n`` of ``q`` reads head ``n // (N / G)``.
        v: like ``k``.
        causal: whether position ``i`` sees only positions up to ``i``.
        dropout: probability of dropping an attention weight.
        first_query: position of the first query among the keys (decoding with a cache).

    Returns:
        ``[S, B, N, D]``.
    """
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    mask = None
    if causal and first_query and q.shape[2] > 1:
        # torch's causal flag aligns the corners at the first key: it cannot say that the queries begin later.
        queries = torch.arange(q.shape[2], device=q.device) + first_query
        mask = torch.arange(k.shape[2], device=q.device)[None, :] <= queries[:, None]
    plain_causal = causal and first_query == 0 and q.shape[2] > 1
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=plain_causal, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.permute(2, 0, 1, 3)
