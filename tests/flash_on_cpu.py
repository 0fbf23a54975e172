"""torch's flash operators for a CPU, by their definition, so that code for CUDA can be held against plain attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, library


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


def _dense(q: Tensor, k: Tensor, v: Tensor, *mask: Any) -> tuple[Tensor, Tensor]:
    """Output ``[B, S, N, D]`` and log-sum-exp ``[B, N, S]``."""
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    scores = _scores(q, k, *mask)
    lse = scores.logsumexp(-1)
    assert lse.isfinite().all(), "the kernel is asked for a query without keys"
    values = v.repeat_interleave(q.shape[2] // v.shape[2], 2)
    return torch.einsum("bnst,btnd->bsnd", (scores - lse[..., None]).exp(), values), lse


def _dense_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *mask: Any
) -> tuple[Tensor, Tensor, Tensor]:
    weights = (_scores(q, k, *mask) - lse[..., None]).exp()
    repeats, groups, scale = q.shape[2] // k.shape[2], k.shape[2], mask[1]
    values, keys = (x.repeat_interleave(repeats, 2) for x in (v, k))
    delta = (grad * out).sum(-1).transpose(1, 2)
    d_scores = (torch.einsum("bsnd,btnd->bnst", grad, values) - delta[..., None]) * weights * scale
    dq = torch.einsum("bnst,btnd->bsnd", d_scores, keys)
    dk, dv = torch.einsum("bnst,bsnd->btnd", d_scores, q), torch.einsum("bnst,bsnd->btnd", weights, grad)
    dk, dv = (x.unflatten(2, (groups, repeats)).sum(3) for x in (dk, dv))
    return dq, dk, dv


def _documents(cum_q: Tensor, cum_k: Tensor, max_q: int, max_k: int) -> Iterator[tuple[slice, slice]]:
    """Queries and keys of each document."""
    assert cum_q.dtype == cum_k.dtype == torch.int32
    assert (int(cum_q.diff().max()), int(cum_k.diff().max())) == (max_q, max_k)
    for queries, keys in zip(pairwise(cum_q.tolist()), pairwise(cum_k.tolist()), strict=True):
        yield slice(*queries), slice(*keys)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cum_q: Tensor | None,
    cum_k: Tensor | None,
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
    mask = causal, scale, window_size_left, window_size_right
    nothing = torch.empty(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)
    assert not dropout
    if cum_q is None or cum_k is None:
        assert (max_q, max_k) == (q.shape[1], k.shape[1])
        return *_dense(q, k, v, *mask), *nothing
    parts = [_dense(q[None, s], k[None, t], v[None, t], *mask) for s, t in _documents(cum_q, cum_k, max_q, max_k)]
    return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1), *nothing


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cum_q: Tensor | None,
    cum_k: Tensor | None,
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
) -> tuple[Tensor, ...]:
    mask = causal, scale, window_size_left, window_size_right
    assert lse.is_contiguous()  # the kernel does not read its strides
    if cum_q is None or cum_k is None:
        assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
        return _dense_backward(grad, q, k, v, out, lse, *mask)
    parts = [
        _dense_backward(grad[None, s], q[None, s], k[None, t], v[None, t], out[None, s], lse[None, :, s], *mask)
        for s, t in _documents(cum_q, cum_k, max_q, max_k)
    ]
    return tuple(torch.cat([part[i][0] for part in parts]) for i in range(3))


@contextmanager
def flash_on_cpu() -> Iterator[None]:
    """Register both operators for tensors of the CPU."""
    kernels = library.Library("aten", "IMPL", "CPU")
    kernels.impl("_flash_attention_forward", _forward)
    kernels.impl("_flash_attention_backward", _backward)
    try:
        yield
    finally:
        kernels._destroy()
