"""The gated delta rule (https://arxiv.org/abs/2412.06464): a linear recurrence in place of attention.

Each head has a state ``M`` of shape ``[D, V]``. A token first lets it decay. It then replaces a share ``beta`` of what
its key reads by its value, and reads the result with its query::

    M = exp(g) M
    M = M + k (beta (v - M^T k))^T
    out = M^T q
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    *,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Outputs and last state of the recurrence, computed in fp32 (fp64 for inputs in fp64).

    Inside a chunk the tokens' corrections of the state solve a triangular system, so that chunks are matrix products
    and only their states follow one another (section 3.3 of the paper). A single token is a chunk of one: the plain
    recurrence.

    Args:
        q: queries ``[S, B, N, D]``.
        k: keys ``[S, B, N, D]``; for a stable recurrence they have length 1.
        v: values ``[S, B, N, V]``.
        log_decay: ``g`` of each token, ``[S, B, N]``, at most 0.
        beta: share of the old value that is replaced, ``[S, B, N]``.
        state: state ``[B, N, D, V]`` before the first token; ``None`` for 0.
        chunk: tokens that are computed at once.

    Returns:
        ``[S, B, N, V]`` in the dtype of ``v``, and the state after the last token.
    """
    length, size = v.shape[0], min(chunk, v.shape[0])
    inner = torch.promote_types(v.dtype, torch.float32)
    # Padding neither decays the state (g = 0) nor changes it (beta = 0).
    q, k, v_, g, b = (_chunks(x.to(inner), size) for x in (q, k, v, log_decay.unsqueeze(-1), beta.unsqueeze(-1)))
    total = g.cumsum(-2)  # [M, B, N, C, 1]: decay since the beginning of the chunk
    # Masked before exp, which would overflow above the diagonal, and after it.
    decay = (total - total.mT).tril().exp().tril()  # [M, B, N, C, C]
    system = (b * k @ k.mT * decay).tril(-1)
    sides = torch.cat((b * v_, b * total.exp() * k), dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    values, keys = solved.split((v_.shape[-1], k.shape[-1]), dim=-1)  # corrections without the state; what they read
    scores, reads = q @ k.mT * decay, q * total.exp()
    last = total[..., -1:, :]
    writes = k * (last - total).exp()
    if state is None:
        state = v_.new_zeros(*k.shape[1:3], k.shape[-1], v_.shape[-1])
    found = []
    for i in range(len(q)):
        corrections = values[i] - keys[i] @ state
        found.append(reads[i] @ state + scores[i] @ corrections)
        state = last[i].exp() * state + writes[i].mT @ corrections
    out = torch.stack(found).movedim(3, 1).flatten(0, 1)  # [M C, B, N, V]
    return out[:length].to(v.dtype), state


def _chunks(x: Tensor, size: int) -> Tensor:
    """``[S, B, N, D]`` to ``[S / size, B, N, size, D]``, padded with zeros."""
    missing = -x.shape[0] % size
    padded = F.pad(x, (0, 0) * (x.ndim - 1) + (0, missing)) if missing else x
    return padded.unflatten(0, (-1, size)).movedim(1, 3)


def causal_convolution(x: Tensor, weight: Tensor, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """SiLU of a causal convolution of each feature along the sequence.

    Args:
        x: ``[S, B, C]``.
        weight: ``[C, 1, K]``.
        before: the ``K - 1`` inputs before the first, ``[K - 1, B, C]``; ``None`` for 0.

    Returns:
        ``[S, B, C]``, and the inputs with those before them, ``[K - 1 + S, B, C]``.
    """
    kept = weight.shape[-1] - 1
    whole = F.pad(x, (0, 0, 0, 0, kept, 0)) if before is None else torch.cat((before, x))
    # Few products of whole sequences: a convolution has one input feature for each output here, and not every device
    # has a kernel for that.
    out = sum(whole[i : i + len(x)] * weight[:, 0, i] for i in range(kept + 1))
    assert isinstance(out, Tensor)
    return F.silu(out), whole


def unit_length(x: Tensor, eps: float = 1e-6) -> Tensor:
    """``x / |x|`` over the last dimension, in fp32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)
