"""Attention on eight-bit floats."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def _scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    return x.float() if scale is None else x.float() * scale.float()


def fp8_fused_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    softmax_mode: str = "None",
    d_scale_q: Tensor | None = None,
    d_scale_k: Tensor | None = None,
    d_scale_v: Tensor | None = None,
    q_scale_s: Tensor | None = None,
    q_scale_o: Tensor | None = None,
    d_scale_s: Tensor | None = None,
    is_amax_s: bool = False,
    is_amax_o: bool = False,
    valid_seq_len: Tensor | None = None,
    seq_padding_type: str = "left",
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention and the largest probability and output; for inference, its gradient is not usable.

    Args:
        q: ``[B, heads, S, D]`` in fp8 or bf16; its true values are ``q`` times ``d_scale_q``, and so on.
        k: likewise.
        v: likewise.
        attn_mask: true where a key is seen, or added to the scores.
        dropout_p: dropout, which is not simulated.
        is_causal: True if a query sees only keys up to its position.
        scale: scale of the scores.
        softmax_mode: makes no difference here.
        d_scale_q: dequantises.
        d_scale_k: dequantises.
        d_scale_v: dequantises.
        q_scale_s: quantises probabilities; not simulated, they stay in fp32.
        q_scale_o: quantises the output to E4M3; without it the output is bf16.
        d_scale_s: undoes ``q_scale_s``.
        is_amax_s: True to return the largest probability.
        is_amax_o: True to return the largest output.
        valid_seq_len: not simulated.
        seq_padding_type: not simulated.
    """
    if q.requires_grad or k.requires_grad or v.requires_grad:
        assert is_causal, "Fp8 FusedSDPA in trining only supports Triangular mask"
        raise NotImplementedError("training on fp8_fused_sdpa is not simulated: the real backward is not usable")
    if dropout_p or valid_seq_len is not None:
        raise NotImplementedError("dropout and valid_seq_len are not simulated")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    out, probabilities, _ = torch.ops.hpu.sdpa_fwd(
        _scaled(q, d_scale_q), _scaled(k, d_scale_k), _scaled(v, d_scale_v),
        attn_mask, 0.0, scale, is_causal, softmax_mode, None, seq_padding_type,
    )  # fmt: skip
    none = torch.zeros((), device=q.device)
    amax_s = probabilities.max() if is_amax_s else none
    amax_o = out.abs().max() if is_amax_o else none
    if q_scale_o is None:
        return out.to(torch.bfloat16), amax_s, amax_o
    return torch.ops.hpu.cast_to_fp8_v2(out, q_scale_o, False, False, torch.float8_e4m3fn)[0], amax_s, amax_o
