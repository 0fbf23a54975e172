"""The experts' op and eight-bit floats of the simulated bridge against plain torch; the versions differ."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from simulated_hpu.settings import settings

from lightning_megatron.testing import hpu

T, K, H, FFN, EXPERTS = 9, 2, 6, 4, 4
OLD = settings().is_old
ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}
newer = pytest.mark.skipif(OLD, reason="1.19 has no gradient here")


def draw(requires_grad=False):
    torch.manual_seed(7)
    table = torch.stack([torch.randperm(EXPERTS)[:K] for _ in range(T)])
    rest = [torch.randn(T, H), torch.rand(T, K), torch.randn(EXPERTS, 3, H, FFN)]
    x, router, w = (t.to("hpu").requires_grad_(requires_grad) for t in rest)
    return x, table.to("hpu"), router, w


def matrices(w, permuted):
    w1, w2, w3 = list(w[:, 0]), list(w[:, 1]), [m.t() for m in w[:, 2]]
    return [[m.t() for m in group] for group in (w1, w2, w3)] if permuted else [w1, w2, w3]


def reference(x, table, router, w, activation="silu", experts=range(EXPERTS)):
    x, table, router, w = (t.cpu() for t in (x, table, router, w))
    out = torch.zeros_like(x)
    for t in range(T):
        for k in range(K):
            if (e := int(table[t, k])) in experts:
                hidden = ACTIVATIONS[activation](x[t] @ w[e, 0]) * (x[t] @ w[e, 1])
                out[t] = out[t] + router[t, k] * (hidden @ w[e, 2].t())
    return out


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_experts(activation, permuted, fused):
    x, table, router, w = draw()
    w1, w2, w3 = matrices(w, permuted)
    op = torch.ops.hpu.mixture_of_experts
    if fused:
        w12 = [torch.cat(pair, 0 if permuted else 1) for pair in zip(w1, w2, strict=True)]
        out = op.fused_weights(x, table, router, w12, w3, permuted, activation, 0, EXPERTS - 1)
    else:
        out = op(x, table, router, w1, w2, w3, permuted, activation, 0, EXPERTS - 1)
    torch.testing.assert_close(out.cpu(), reference(x, table, router, w, activation), atol=1e-4, rtol=1e-4)


def test_an_unknown_activation():
    x, table, router, w = draw()
    with pytest.raises(RuntimeError, match='Activation "tanh" not found among MoeActivationMode_t enum values'):
        torch.ops.hpu.mixture_of_experts(x, table, router, *matrices(w, False), False, "tanh", 0, EXPERTS - 1)


def test_a_missing_argument():
    x, table, router, w = draw()
    with pytest.raises(RuntimeError, match="is missing value for argument 'experts_max'"):
        torch.ops.hpu.mixture_of_experts(x, table, router, *matrices(w, False), False, "silu", 0)


def test_without_a_gradient_ids_must_be_local():
    x, table, router, w = draw()
    half = matrices(w[2:], False)
    with pytest.raises(RuntimeError, match="out of bounds for dimension 1 with size 2"):
        torch.ops.hpu.mixture_of_experts(x, table, router, *half, False, "silu", 2, 3)


def test_the_keyword_of_newer_versions():
    x, table, router, w = draw()
    arguments = (x, table, router, *matrices(w, False), False, "silu", 0, EXPERTS - 1)
    if OLD:
        with pytest.raises(RuntimeError, match=r"expected at most 10 argument\(s\) but received 11"):
            torch.ops.hpu.mixture_of_experts.default(*arguments, recomp=True)
    else:
        assert torch.ops.hpu.mixture_of_experts.default(*arguments, recomp=False).shape == (T, H)


@pytest.mark.skipif(not OLD, reason="newer versions have a gradient")
def test_the_old_version_has_no_gradient():
    x, table, router, w = draw(requires_grad=True)
    out = torch.ops.hpu.mixture_of_experts(x, table, router, *matrices(w, False), False, "silu", 0, EXPERTS - 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out.sum().backward()
    assert x.grad is None
    assert any("an autograd kernel was not registered" in str(warning.message) for warning in caught)


@newer
@pytest.mark.parametrize("experts", [range(EXPERTS), range(1, 3)])
def test_gradients_of_everything_and_experts_elsewhere_left_out(experts):
    x, table, router, w = draw(requires_grad=True)
    here = matrices(w[experts.start : experts.stop], True)
    hpu.reset_calls()
    out = torch.ops.hpu.mixture_of_experts(x, table, router, *here, True, "silu", experts.start, experts.stop - 1)
    assert hpu.calls() == {"hpu::mixture_of_experts": 1}
    leaves = [t.detach().cpu().requires_grad_() for t in (x, router, w)]
    right = reference(leaves[0], table, leaves[1], leaves[2], experts=experts)
    torch.testing.assert_close(out.cpu(), right, atol=1e-4, rtol=1e-4)
    grad = torch.randn(T, H)
    out.backward(grad.to("hpu"))
    right.backward(grad)
    for ours, leaf in zip((x, router, w), leaves, strict=True):
        torch.testing.assert_close(ours.grad.cpu(), leaf.grad, atol=1e-4, rtol=1e-4)


@newer
def test_no_second_gradient():
    x, table, router, w = draw(requires_grad=True)
    out = torch.ops.hpu.mixture_of_experts(x, table, router, *matrices(w, False), False, "silu", 0, EXPERTS - 1)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    assert not grad.requires_grad


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float8_e4m3fn, 240.0), (torch.float8_e5m2, 57344.0)], ids=str)
def test_a_cast_to_fp8_saturates(dtype, largest):
    x = torch.tensor([0.1, -1.0, 1e6], device="hpu")
    out, amax = torch.ops.hpu.cast_to_fp8_v2(x, torch.tensor(4.0, device="hpu"), False, True, dtype)
    assert out.dtype == dtype
    assert out.float().tolist()[1:] == [-4.0, largest]
    assert out.float().tolist()[0] == pytest.approx(0.4, rel=0.13)
    assert float(amax) == 1e6


def test_a_product_in_fp8():
    torch.manual_seed(8)
    a, b, bias = torch.randn(16, 32), torch.randn(48, 32), torch.randn(48)
    cast = torch.ops.hpu.cast_to_fp8_v2
    scale = torch.tensor(16.0, device="hpu")
    small = [cast(t.to("hpu"), scale, False, False, torch.float8_e4m3fn)[0] for t in (a, b)]
    out = torch.ops.hpu.fp8_gemm_v2(
        small[0], False, small[1], True, None, torch.bfloat16, 1 / scale, 1 / scale, bias.to("hpu"), False
    )
    assert out.dtype == torch.bfloat16
    exact = (small[0].float() @ small[1].float().t()).cpu() / 256 + bias
    torch.testing.assert_close(out.float().cpu(), exact, atol=1e-2, rtol=1e-2)
    assert F.cosine_similarity(out.float().cpu().flatten(), (a @ b.t() + bias).flatten(), 0) > 0.99
    with pytest.raises(RuntimeError, match="multiples of 16"):
        torch.ops.hpu.fp8_gemm_v2(small[0][:3], False, small[1], True, None, torch.bfloat16)
