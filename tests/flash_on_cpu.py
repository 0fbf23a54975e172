"""torch's flash operators for a CPU, by their definition, so that code for CUDA can be held against plain attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float, left: int | None, right: int | None) -> Tensor:
    """``[B, S, N, D], [B, T, G, D] -> [B, N, S, T]``; the last query is aligned with the last key."""
    keys = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bsnd,btnd->bnst", q, keys) * scale
    ahead = torch.arange(k.shape[1]) - (torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1])
    right = 0 if causal else right
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if right is not None and right >= 0:
        hidden |= ahead > right
    if left is not None and left >= 0:
        hidden |= ahead < -left
    return scores.masked_fill(hidden, float("-inf"))


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cum_q: None,
    cum_k: None,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    debug: bool,
    *,
    scale: float,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **_: Any,
) -> tuple[Tensor, ...]:
    assert (max_q, max_k, dropout) == (q.shape[1], k.shape[1], 0.0)
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    scores = _scores(q, k, causal, scale, window_size_left, window_size_right)
    lse = scores.logsumexp(-1)
    assert lse.isfinite().all(), "the kernel is asked for a query without keys"
    values = v.repeat_interleave(q.shape[2] // v.shape[2], 2)
    out = torch.einsum("bnst,btnd->bsnd", (scores - lse[..., None]).exp(), values)
    return out, lse, torch.empty(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cum_q: None,
    cum_k: None,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    state: Tensor,
    unused: Tensor,
    *,
    scale: float,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    assert lse.is_contiguous()  # the kernel does not read its strides
    weights = (_scores(q, k, causal, scale, window_size_left, window_size_right) - lse[..., None]).exp()
    repeats, groups = q.shape[2] // k.shape[2], k.shape[2]
    values, keys = (x.repeat_interleave(repeats, 2) for x in (v, k))
    delta = (grad * out).sum(-1).transpose(1, 2)
    d_scores = (torch.einsum("bsnd,btnd->bnst", grad, values) - delta[..., None]) * weights * scale
    dq = torch.einsum("bnst,btnd->bsnd", d_scores, keys)
    dk, dv = torch.einsum("bnst,bsnd->btnd", d_scores, q), torch.einsum("bnst,bsnd->btnd", weights, grad)
    return dq, *(x.unflatten(2, (groups, repeats)).sum(3) for x in (dk, dv))


@contextmanager
def flash_on_cpu() -> Iterator[None]:
    """Register both operators for tensors of the CPU."""
    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl("_flash_attention_forward", _forward)
    library.impl("_flash_attention_backward", _backward)
    try:
        yield
    finally:
        library._destroy()
