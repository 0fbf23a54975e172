"""Attention, norm and rotary embedding of the bridge against plain torch, to the bridge's tolerances."""

from __future__ import annotations

import math
import warnings

import card
import pytest
import torch
from card import close
from habana_frameworks.torch.hpex.kernels import (
    FusedSDPA,
    RotaryPosEmbeddingHelperV1,
    RotaryPosEmbeddingHelperV2,
    RotaryPosEmbeddingHelperV3,
    apply_rotary_pos_emb,
    fp8_fused_sdpa,
)
from habana_frameworks.torch.hpex.normalization import FusedRMSNorm, RmsNormBwdMode

B, H, S, D = 2, 4, 12, 8
DTYPES = (torch.float32, torch.bfloat16)


def draw(*shape, dtype=torch.float32, grad=True):
    return torch.randn(shape, device="hpu").to(dtype).requires_grad_(grad)


def qkv(kv_heads=H, dtype=torch.float32):
    torch.manual_seed(1)
    return draw(B, H, S, D, dtype=dtype), draw(B, kv_heads, S, D, dtype=dtype), draw(B, kv_heads, S, D, dtype=dtype)


def reference(q, k, v, mask=None, causal=False, scale=None):
    """Probabilities and output, in fp32 on the host, with autograd's gradients."""
    q, k, v = (t.detach().float().cpu().requires_grad_() for t in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    keys, values = (t.repeat_interleave(groups, 1) for t in (k, v))
    scores = q @ keys.transpose(-2, -1) * (scale or 1 / math.sqrt(q.shape[-1]))
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    if mask is not None:
        mask = mask.cpu()
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.float()
    return (q, k, v), scores.softmax(-1) @ values


MASKS = {
    "none": (None, False),
    "causal": (None, True),
    "bool": (torch.arange(S) < S - 3, False),
    "added": (torch.linspace(-2, 0, S), False),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kv_heads", [H, 2, 1])
def test_fused_sdpa_and_its_gradients(dtype, recompute, mask, kv_heads):
    q, k, v = qkv(kv_heads, dtype)
    given, causal = MASKS[mask]
    if given is not None:
        given = given.expand(B, 1, S, S).to("hpu")
    card.reset_calls()
    tolerance = card.product().tolerance[dtype]
    out = FusedSDPA.apply(q, k, v, given, 0.0, causal, None, "None", recompute)
    leaves, right = reference(q, k, v, given, causal)
    close(out, right, tolerance)
    grad = torch.randn(out.shape)
    out.backward(grad.to("hpu", dtype))
    right.backward(grad)
    for ours, leaf in zip((q, k, v), leaves, strict=True):
        assert ours.grad.dtype == dtype
        close(ours.grad, leaf.grad, tolerance)
    name = "hpu::sdpa_recomp_" if recompute else "hpu::sdpa_"
    card.assert_calls({f"{name}fwd": 1, f"{name}bwd": 1})


@pytest.mark.parametrize("recompute", [False, True])
def test_with_bf16_inputs_the_softmax_is_bf16(recompute):
    q, k, v = (t.detach() for t in qkv(dtype=torch.bfloat16))

    def error(mode):
        out = FusedSDPA.apply(q, k, v, None, 0.0, True, 2.0, mode, recompute)
        _, right = reference(q, k, v, causal=True, scale=2.0)
        return float((out.float().cpu() - right.detach()).norm() / right.detach().norm())

    # Rounding of the output is in both.
    assert 1.25 * error("fp32") < error("None") < 2**-5


def test_the_fp32_softmax_is_for_inference_in_bf16():
    text = "softmax_mode = fp32 is supported only for inference mode and when q/k/v inputs are BF16"
    for inputs in (qkv(dtype=torch.bfloat16), tuple(t.detach() for t in qkv())):
        with card.refuses(AssertionError, match=text):
            FusedSDPA.apply(*inputs, None, 0.0, True, None, "fp32", True)


@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_is_the_same_in_backward(recompute):
    q, k, v = qkv()
    with torch.no_grad():
        v.copy_(torch.eye(S, D))
    torch.hpu.manual_seed(3)
    out = FusedSDPA.apply(q, k, v, None, 0.5, False, None, "None", recompute)
    direction, eps = torch.randn_like(v), 1e-2
    (dv,) = torch.autograd.grad(out.sum(), v)
    torch.hpu.manual_seed(3)
    moved = FusedSDPA.apply(q, k, v + eps * direction, None, 0.5, False, None, "None", recompute)
    assert float((moved - out).detach().sum() / eps) == pytest.approx(float((dv * direction).sum()), rel=1e-2)
    assert (out == 0).any() or recompute


def test_causal_is_aligned_top_left():
    q, (_, k, v) = draw(B, H, 3, D), qkv()
    _, right = reference(q, k, v, causal=True)
    close(FusedSDPA.apply(q, k, v, None, 0.0, True), right, 1e-3)


def test_recompute_follows_the_devices_switch():
    card.reset_calls()
    with torch.hpu.sdp_kernel(enable_recompute=True):
        FusedSDPA.apply(*qkv())
    FusedSDPA.apply(*qkv())
    card.assert_calls({"hpu::sdpa_recomp_fwd": 1, "hpu::sdpa_fwd": 1})


def test_row_maximum_and_sum_merge_parts_of_the_keys():
    """Results for attention over several ranks: each part's maximum and sum of exponentials."""
    q, k, v = (t.detach() for t in qkv())
    parts = [
        torch.ops.hpu.sdpa_recomp_fwd(q, k[:, :, at], v[:, :, at], None, 0.0, 0.3, False, True, "None", None, "left")
        for at in (slice(0, 5), slice(5, S))
    ]
    top = torch.maximum(parts[0][1], parts[1][1])
    weights = [(m - top).exp() / linv for _, m, linv, _ in parts]
    merged = sum(w * out for w, (out, *_) in zip(weights, parts, strict=True)) / sum(weights)
    _, right = reference(q, k, v, scale=0.3)
    close(merged, right, 1e-5)
    assert parts[0][1].shape == parts[0][2].shape == (B, H, S, 1)
    assert parts[0][3].dtype == torch.int32


def test_nothing_is_kept_without_a_gradient():
    q, k, v = (t.detach() for t in qkv())
    _, m, linv, seed = torch.ops.hpu.sdpa_recomp_fwd(q, k, v, None, 0.0, 1.0, True, False, "None", None, "left")
    assert [t.shape for t in (m, linv, seed)] == [(1,)] * 3


MASK = torch.ones(B, 1, S, S, dtype=torch.bool)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ((None, 0.0, False, None, "None", None, None, "left", False, True), AssertionError,
         "return_attn_probs is supported only for inference mode"),
        ((None, 0.0, False, None, "fast", True), AssertionError,
         r"Optimized softmax mode is supported in recompute training mode only in causal\(triangular\) mask case"),
        ((None, 0.0, False, None, "None", True, None, "left", True), AssertionError,
         "Return_dropout_mask is not supported in recompute mode"),
        ((None, 0.0, True, None, "None", None, MASK), AssertionError,
         r"Valid sequence length is supported only in inference with is_causal\(triangular\) mask case"),
        ((MASK, 0.0, True), AssertionError, "use_attn_mask and is_causal can not be True at the same time"),
        ((None, 0.0, False, None, "None", None, None, "left", False, False, (-1, -1)), TypeError, "positional arg"),
    ],
)  # fmt: skip
def test_what_fused_sdpa_refuses(options, error, text):
    with card.refuses(error, match=text):
        FusedSDPA.apply(*qkv(), *(o.to("hpu") if isinstance(o, torch.Tensor) else o for o in options))


def test_fused_sdpa_takes_no_keywords():
    with card.refuses(TypeError, match="argument"):
        FusedSDPA.apply(*qkv(), is_causal=True)


def test_ops_have_the_bridges_schemas_and_live_on_the_device_alone():
    q, k, v = (t.detach() for t in qkv())
    with card.refuses(
        RuntimeError, match=r"is missing value for argument 'seq_padding_type'\. Declaration: hpu::sdpa_"
    ):
        torch.ops.hpu.sdpa_recomp_fwd(q, k, v, None, 0.0, 1.0, True, True, "None", None)
    with card.refuses(NotImplementedError, match="Could not run 'hpu::rms_norm' with arguments from the 'CPU'"):
        torch.ops.hpu.rms_norm(torch.ones(2), torch.ones(2), 1e-5)


def test_fp8_sdpa():
    q, k, v = (t.detach() for t in qkv())
    out, amax_s, amax_o = fp8_fused_sdpa(q, k, v, is_causal=True, is_amax_s=True, is_amax_o=True)
    _, right = reference(q, k, v, causal=True)
    close(out, right, 0.02)
    assert float(amax_s) == 1.0  # the first query sees one key
    assert float(amax_o) == pytest.approx(float(right.detach().abs().max()), rel=1e-3)
    small, _, _ = fp8_fused_sdpa(q, k, v, d_scale_v=torch.tensor(2.0), q_scale_o=torch.tensor(8.0))
    assert small.dtype == torch.float8_e4m3fn
    close(small.float() / 16, reference(q, k, v)[1], 0.08)
    with card.refuses(AssertionError, match="Fp8 FusedSDPA in trining only supports Triangular mask"):
        fp8_fused_sdpa(*qkv())


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(
    ("x_dtype", "gamma_dtype", "tolerance"),
    [(torch.float32,) * 2 + (1e-3,), (torch.bfloat16,) * 2 + (0.021,), (torch.bfloat16, torch.float32, 0.015)],
)
def test_fused_rms_norm_and_its_gradients(x_dtype, gamma_dtype, tolerance, fast):
    torch.manual_seed(2)
    x, gamma = draw(5, 3, 16, dtype=x_dtype), draw(16, dtype=gamma_dtype)
    out = FusedRMSNorm.apply(x, gamma, 1e-5, True, RmsNormBwdMode.DEFAULT.value, fast)
    assert out.dtype == (x_dtype if x_dtype == gamma_dtype else torch.float32)
    leaves = [t.detach().float().cpu().requires_grad_() for t in (x, gamma)]
    right = leaves[0] * torch.rsqrt(leaves[0].square().mean(-1, keepdim=True) + 1e-5) * leaves[1]
    close(out, right, tolerance)
    grad = torch.randn(out.shape) / 8
    out.backward(grad.to("hpu", out.dtype))
    right.backward(grad)
    for ours, leaf in zip((x, gamma), leaves, strict=True):
        assert ours.grad.dtype == ours.dtype
        close(ours.grad, leaf.grad, tolerance)


@pytest.mark.parametrize("other", range(4))
def test_the_norms_gradients_are_fp32_where_one_of_four_dtypes_differs(other):
    dtypes = [torch.bfloat16] * 4
    grad, x, gamma, inverse = (torch.ones(shape, device="hpu") for shape in ((3, 8), (3, 8), (8,), (3, 1)))
    tensors = [t.to(dtype) for t, dtype in zip((grad, x, gamma, inverse), dtypes, strict=True)]
    same = torch.ops.hpu.rms_norm_backward(*tensors, True, 0)
    assert [g.dtype for g in same] == [torch.bfloat16] * 2
    tensors[other] = tensors[other].float()
    assert [g.dtype for g in torch.ops.hpu.rms_norm_backward(*tensors, True, 0)] == [torch.float32] * 2


def halves(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def angles(positions, channels):
    turn = torch.outer(torch.arange(positions).float(), 10.0 ** -torch.arange(channels // 2))
    return torch.cat((turn, turn), -1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.03)], ids=str)
def test_rotary_v1_and_its_gradient(dtype, tolerance):
    p, angle = draw(S, B, H, D, dtype=dtype), angles(S, D)[:, None, None]
    cos, sin = (t.to("hpu", dtype) for t in (angle.cos(), angle.sin()))
    out = RotaryPosEmbeddingHelperV1.apply(p, cos, sin, 0)
    assert out.dtype == dtype
    leaf = p.detach().float().cpu().requires_grad_()
    right = halves(leaf, angle.cos(), angle.sin())
    close(out, right, tolerance)
    grad = torch.randn(out.shape)
    out.backward(grad.to("hpu", dtype))
    right.backward(grad)
    close(p.grad, leaf.grad, tolerance)
    assert cos.grad is None


@card.simulation
def test_rotary_at_an_offset_is_not_simulated():
    p, angle = draw(S, B, H, D), angles(S, D)[:, None, None].to("hpu")
    with pytest.raises(NotImplementedError, match="offset 0 only"):
        RotaryPosEmbeddingHelperV1.apply(p, angle.cos(), angle.sin(), 1)


def test_rotary_v2_takes_positions():
    p, angle = draw(B, H, S, D), angles(3 * S, D)
    ids = torch.stack([torch.arange(S), torch.arange(S, 2 * S)])
    out = RotaryPosEmbeddingHelperV2.apply(p, angle.cos().to("hpu"), angle.sin().to("hpu"), ids.to("hpu"))
    leaf = p.detach().cpu().requires_grad_()
    right = halves(leaf, angle[ids].cos().unsqueeze(1), angle[ids].sin().unsqueeze(1))
    close(out, right, 1e-3)
    out.square().sum().backward()
    right.square().sum().backward()
    close(p.grad, leaf.grad, 1e-3)


def test_rotary_v3_turns_neighbours_of_the_first_channels():
    p, angle = draw(S, B, H, D), angles(2 * S, D // 2)[:, : D // 4]
    cache = torch.stack([angle.cos(), angle.sin()], -1)
    out = RotaryPosEmbeddingHelperV3.apply(p, cache.to("hpu"))
    leaf = p.detach().cpu().requires_grad_()
    pairs = torch.view_as_complex(leaf[..., : D // 2].unflatten(-1, (-1, 2)))
    turned = torch.view_as_real(pairs * torch.view_as_complex(cache[:S])[:, None, None]).flatten(-2)
    right = torch.cat((turned, leaf[..., D // 2 :]), -1)
    close(out, right, 1e-3)
    out[..., 1].sum().backward()
    right[..., 1].sum().backward()
    close(p.grad, leaf.grad, 1e-3)


def test_the_bare_rotary_function_has_no_gradient():
    p, angle = draw(S, B, H, D), angles(S, D)[:, None, None].to("hpu")
    out = apply_rotary_pos_emb(p, angle.cos(), angle.sin())
    close(out, halves(p.detach().cpu(), angle.cpu().cos(), angle.cpu().sin()), 1e-3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out.sum().backward()
    assert p.grad is None
    assert any("an autograd kernel was not registered" in str(w.message) for w in caught)
