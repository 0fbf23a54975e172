"""Attention by torch's flash kernel with its log-sum-exp: for parts of the keys, later queries, windows and sinks.

``F.scaled_dot_product_attention`` returns no log-sum-exp and knows no window. The operators behind it do.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.config.score_rule import ScoreRule
from lightning_megatron.ops.core.attention_call import AttentionCall

MAX_HEAD_DIM = 256
"""Largest head dimension of the kernel."""


class _Seen(NamedTuple):
    """Queries that see a key, keys that a query sees, and the kernel's mask between them.

    Attributes:
        queries: number of queries; later ones see no key.
        keys: the keys.
        mask: arguments of the kernel, which aligns the last query with the last key.
    """

    queries: int
    keys: slice
    mask: dict[str, Any]


def _seen(queries: int, keys: int, call: AttentionCall) -> _Seen:
    first_query, window = call.first_query, call.rule.window
    if not call.causal:
        return _Seen(queries, slice(0, keys), {"is_causal": False})
    begin, end = max(0, first_query - window + 1) if window else 0, min(keys, first_query + queries)
    count = max(0, min(queries, end + window - 1 - first_query)) if window else queries
    ahead = first_query + count - end  # positions by which a query is later than the kernel's alignment has it
    left = window - 1 - ahead if window and first_query + count - window > begin else -1
    right = ahead if first_query + 1 < end else -1
    is_causal = left < 0 and right == 0
    mask: dict[str, Any] = {"is_causal": is_causal}
    if not is_causal:
        mask |= {"window_size_left": left, "window_size_right": right}
    return _Seen(count if begin < end else 0, slice(begin, end), mask)


def flash_forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Output ``[S, B, N, D]`` and log-sum-exp ``[S, B, N]``, fp32; 0 and minus infinity for a query without keys.

    Args:
        q: ``[S, B, N, D]``.
        k: ``[T, B, G, D]``.
        v: ``[T, B, G, D]``.
        call: causal or not, with a scale, a window, or neither.
    """
    seen = _seen(len(q), len(k), call)
    if not seen.queries:
        return torch.zeros_like(q), q.new_full(q.shape[:-1], float("-inf"), dtype=torch.float32)
    rows = [x.transpose(0, 1) for x in (q[: seen.queries], k[seen.keys], v[seen.keys])]
    lengths = rows[0].shape[1], rows[1].shape[1]
    mask = dict(seen.mask)
    given = *rows, None, None, *lengths, 0.0, mask.pop("is_causal"), False
    out, lse, *_ = torch.ops.aten._flash_attention_forward(*given, scale=call.rule.factor(q.shape[-1]), **mask)
    out, lse = out.transpose(0, 1), lse.permute(2, 0, 1)
    unseeing = len(q) - seen.queries
    if unseeing:
        out = F.pad(out, (0, 0) * 3 + (0, unseeing))
        lse = F.pad(lse, (0, 0) * 2 + (0, unseeing), value=float("-inf"))
    return out, lse


def flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: AttentionCall,
) -> tuple[Tensor, Tensor, Tensor]:
    """Contribution of these keys to the gradients of ``q``, ``k`` and ``v``, with the call of the forward.

    Args:
        grad: gradient of the output, ``[S, B, N, D]``.
        q: ``[S, B, N, D]``.
        k: ``[T, B, G, D]``.
        v: ``[T, B, G, D]``.
        out: ``[S, B, N, D]``, the output over all keys, where these are only a part.
        lse: ``[S, B, N]`` fp32, over all keys.
        call: causal or not, with a scale, a window, or neither.
    """
    seen = _seen(len(q), len(k), call)
    if not seen.queries:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    grads, queries, outs = (x[: seen.queries].transpose(0, 1) for x in (grad, q, out))
    keys, values = (x[seen.keys].transpose(0, 1) for x in (k, v))
    lses = lse[: seen.queries].permute(1, 2, 0).contiguous()
    mask = dict(seen.mask)
    # Without dropout the kernel reads no state of random numbers.
    state, unused = torch.empty(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    lengths = queries.shape[1], keys.shape[1]
    given = grads, queries, keys, values, outs, lses, None, None, *lengths, 0.0, mask.pop("is_causal"), state, unused
    found = torch.ops.aten._flash_attention_backward(*given, scale=call.rule.factor(q.shape[-1]), **mask)
    dq, dk, dv = (x.transpose(0, 1) for x in found)
    before, after = seen.keys.start, len(k) - seen.keys.stop
    if before or after:
        dk, dv = (F.pad(x, (0, 0) * 3 + (before, after)) for x in (dk, dv))
    unseeing = len(q) - seen.queries
    return F.pad(dq, (0, 0) * 3 + (0, unseeing)) if unseeing else dq, dk, dv


def flash_lacks(dtype: torch.dtype, keys: int, values: int, causal: bool, rule: ScoreRule) -> str | None:
    """The reason why the kernel computes no such attention; ``None`` if it does.

    Args:
        dtype: dtype of queries, keys and values.
        keys: features of a key.
        values: features of a value.
        causal: True for a causal mask.
        rule: rule of the scores.
    """
    if rule.softcap or rule.slopes or (rule.window and not causal):
        return str(rule)
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{dtype}"
    if keys != values:
        return f"values of {values} features, and keys of {keys}"
    if keys % 8 or keys > MAX_HEAD_DIM:
        return f"a head of {keys}, and the kernel takes multiples of 8 up to {MAX_HEAD_DIM}"
    return None


def beyond_flash(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> str | None:
    """The reason why the kernel does not support a call; ``None`` if it does."""
    reasons = {"a bias of the scores": call.bias is not None, "padding among the keys": call.key_mask is not None}
    reasons["dropout of weights"] = bool(call.dropout)
    found = next((reason for reason, holds in reasons.items() if holds), None)
    found = found or flash_lacks(q.dtype, q.shape[-1], v.shape[-1], call.causal, call.rule)
    if found is not None:
        return found
    queries, keys, values = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    asked = torch.backends.cuda.SDPAParams(queries, keys, values, None, 0.0, False, True)
    # The card may lack the kernel, and a user may have switched it off.
    return None if torch.backends.cuda.can_use_flash_attention(asked) else "torch's flash kernel is not available"
