"""Scaled dot-product attention, with its probabilities kept, or recomputed from the maximum and sum of each row.

With bf16 inputs the documentation has scores and softmax in bf16, except in the softmax mode "fp32". The exact places
where the kernels round are not known; here the scores, their distances from the maximum, the exponentials and the
probabilities are rounded, and sums are fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from simulated_hpu.ops.registry import define_op

Rounding = Callable[[Tensor], Tensor]
"""Rounding of an fp32 tensor to the values of the dtype that a softmax is computed in."""


def _rounding(q: Tensor, softmax_mode: str) -> Rounding:
    if q.dtype == torch.bfloat16 and softmax_mode != "fp32":
        return lambda x: x.bfloat16().float()
    return lambda x: x


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, scale: float, is_causal: bool, rounded: Rounding) -> Tensor:
    """Scores ``[..., Sq, Sk]`` as fp32; masked ones are minus infinity. The causal mask is aligned top left."""
    scores = rounded(q.float() @ k.float().transpose(-2, -1) * scale)
    if is_causal:
        assert mask is None, "use_attn_mask and is_causal can not be True at the same time"
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else rounded(scores + mask.float())


def _exponentials(scores: Tensor, m: Tensor, rounded: Rounding) -> Tensor:
    """Exponentials of the distances of scores from the maximum of their row."""
    return rounded(rounded(scores - m.float()).exp())


def _keep(seed: Tensor, p: float, like: Tensor) -> Tensor:
    """Mask of the probabilities that dropout keeps, the same for the same seed."""
    if seed.is_meta:
        return torch.empty_like(like, dtype=torch.bool)
    generator = torch.Generator().manual_seed(int(seed))  # old torch makes none for the device
    return (torch.rand(like.shape, generator=generator) >= p).to(like.device)


def _seed(q: Tensor) -> Tensor:
    return torch.randint(2**31 - 1, (1,), dtype=torch.int32, device=q.device)


def _forward_recomputed(
    q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, p: float, scale: float, is_causal: bool,
    requires_backward: bool, softmax_mode: str, valid_seq_len: Tensor | None, seq_padding_type: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    if valid_seq_len is not None:
        raise NotImplementedError("valid_seq_len is not simulated")
    rounded = _rounding(q, softmax_mode)
    scores = _scores(q, k, attention_mask, scale, is_causal, rounded)
    m = scores.amax(-1, keepdim=True).to(q.dtype)
    exponentials = _exponentials(scores, m, rounded)
    short = softmax_mode == "fast" and q.dtype == torch.bfloat16 and p == 0
    linv = (1 / exponentials.sum(-1, keepdim=True)).to(torch.bfloat16 if short else torch.float32)
    seed = _seed(q)
    probabilities = rounded(exponentials * linv.float())
    if p > 0:
        probabilities = probabilities * _keep(seed, p, probabilities) / (1 - p)
    out = (probabilities @ v.float()).to(q.dtype)
    if not requires_backward:
        m, linv = m.new_zeros(1), linv.new_zeros(1)
    return out, m, linv, seed


def _backward_recomputed(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, m: Tensor, linv: Tensor,
    seed: Tensor | None, is_causal: bool, p: float, scale: float, softmax_mode: str, fwd_out: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rounded = _rounding(q, softmax_mode)
    scores = _scores(q, k, attention_mask, scale, is_causal, rounded)
    probabilities = rounded(_exponentials(scores, m, rounded) * linv.float())
    keep = None
    if p > 0:
        assert seed is not None
        keep = _keep(seed, p, probabilities)
    return _gradients(grad, q, k, v, probabilities, keep, p, scale, fwd_out)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, p: float, scale: float, is_causal: bool,
    softmax_mode: str, valid_seq_len: Tensor | None, seq_padding_type: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if valid_seq_len is not None:
        raise NotImplementedError("valid_seq_len is not simulated")
    rounded = _rounding(q, softmax_mode)
    scores = _scores(q, k, attention_mask, scale, is_causal, rounded)
    exponentials = _exponentials(scores, scores.amax(-1, keepdim=True), rounded)
    probabilities = rounded(exponentials / exponentials.sum(-1, keepdim=True))
    keep = torch.ones(1, dtype=torch.bool, device=q.device)
    dropped = probabilities
    if p > 0:
        keep = _keep(_seed(q), p, probabilities)
        dropped = probabilities * keep / (1 - p)
    return (dropped @ v.float()).to(q.dtype), probabilities.to(q.dtype), keep.to(torch.int8)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, P: Tensor, dm: Tensor | None, is_causal: bool, p: float,
    scale: float, fwd_out: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    keep = dm.bool() if p > 0 and dm is not None else None
    return _gradients(grad, q, k, v, P.float(), keep, p, scale, fwd_out)


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, probabilities: Tensor, keep: Tensor | None, p: float, scale: float,
    out: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v; summed over the heads that share a key and a value.

    The row sum of ``dO O`` is that of ``dP P``, dropout or not.
    """
    grad = grad.float()
    dP = grad @ v.float().transpose(-2, -1)
    dropped = probabilities
    if keep is not None:
        dropped, dP = probabilities * keep / (1 - p), dP * keep / (1 - p)
    dS = probabilities * (dP - (grad * out.float()).sum(-1, keepdim=True))
    dV = dropped.transpose(-2, -1) @ grad
    dQ, dK = dS @ k.float() * scale, dS.transpose(-2, -1) @ q.float() * scale
    return tuple(g.sum_to_size(t.shape).to(t.dtype) for g, t in ((dQ, q), (dK, k), (dV, v)))  # type: ignore[return-value]


def define() -> None:
    """Define the four ops. The order of p, scale and is_causal differs between forward and backward."""
    define_op(
        "sdpa_recomp_fwd(Tensor q, Tensor k, Tensor v, Tensor? attention_mask, float p, float scale, bool is_causal, "
        "bool requires_backward, str softmax_mode, Tensor? valid_seq_len, str seq_padding_type) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
        _forward_recomputed,
    )
    define_op(
        "sdpa_recomp_bwd(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? attention_mask, Tensor m, Tensor linv, "
        "Tensor ? seed, bool is_causal, float p, float scale, str softmax_mode, Tensor fwd_out) "
        "-> (Tensor, Tensor, Tensor)",
        _backward_recomputed,
    )
    define_op(
        "sdpa_fwd(Tensor q, Tensor k, Tensor v, Tensor? attention_mask, float p, float scale, bool is_causal, "
        "str softmax_mode, Tensor? valid_seq_len, str seq_padding_type) -> (Tensor, Tensor, Tensor)",
        _forward,
    )
    define_op(
        "sdpa_bwd(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor P, Tensor? dm, bool is_causal, float p, "
        "float scale, Tensor fwd_out) -> (Tensor, Tensor, Tensor)",
        _backward,
    )
