"""The experts' op and eight-bit floats of the bridge against plain torch; the versions differ."""

from __future__ import annotations

import warnings

import card
import pytest
import torch
import torch.nn.functional as F
from habana_frameworks.torch.utils.internal import is_lazy

from lightning_megatron.ops.mixture_of_experts import range_is_seen

T, K, H, FFN, EXPERTS = 9, 2, 6, 4, 4
OLD, LAZY = card.OLD, is_lazy()
ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}
newer = pytest.mark.skipif(OLD, reason="1.19 has no gradient here")
DENSE = card.profile() == "1.22" and not LAZY
ranged = pytest.mark.skipif(OLD or DENSE, reason="this version's kernel with gradients multiplies every token by all")


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
    with card.refuses(RuntimeError, match='Activation "tanh" not found among MoeActivationMode_t enum values'):
        torch.ops.hpu.mixture_of_experts(x, table, router, *matrices(w, False), False, "tanh", 0, EXPERTS - 1)


def test_a_missing_argument():
    x, table, router, w = draw()
    with card.refuses(RuntimeError, match="is missing value for argument 'experts_max'"):
        torch.ops.hpu.mixture_of_experts(x, table, router, *matrices(w, False), False, "silu", 0)


def without_gradients(*arguments):
    """Outside of inference mode a call takes the kernel that has gradients, whether they are wanted or not."""
    with torch.inference_mode():
        return torch.ops.hpu.mixture_of_experts(*arguments)


MODES = {"gradients": torch.enable_grad, "without": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("mode", list(MODES))
def test_the_range_of_experts_is_seen_or_not(mode):
    """The answer of a real card is in the report: documents do not say it for each version."""
    with MODES[mode]():
        found = range_is_seen("hpu", mode == "gradients", mode == "inference")
    card.note(f"the range is seen, {mode}", found)
    if card.SIMULATED:
        assert found == (LAZY or not (OLD or DENSE or mode == "inference"))


@card.simulation  # on a card, who knows what such an id writes over
@pytest.mark.skipif(LAZY, reason="the kernel of graphs looks at the range")
def test_without_a_gradient_ids_must_be_positions_in_the_list():
    x, table, router, w = draw()
    half = matrices(w[2:], False)
    with card.refuses(RuntimeError, match="out of bounds for dimension 1 with size 2"):
        without_gradients(x, table, router, *half, False, "silu", 2, 3)


@card.simulation  # the order of repeated ids is not defined on a card
@pytest.mark.skipif(LAZY, reason="the kernel of graphs looks at the range")
def test_without_a_gradient_only_one_weight_of_a_repeated_id_is_kept():
    """Ours gave other ranks' choices to expert 0 with weight 0, which took the weight of a token's own expert 0."""
    x, table, router, w = draw()
    table, router = torch.zeros_like(table), router * torch.tensor([1.0, 0.0]).to("hpu")
    found = without_gradients(x, table, router, *matrices(w, False), False, "silu", 0, EXPERTS - 1)
    assert not found.cpu().any()


@pytest.mark.skipif(not LAZY, reason="only graphs look at the range")
def test_in_lazy_mode_experts_elsewhere_are_left_out_without_gradients_too():
    x, table, router, w = draw()
    found = without_gradients(x, table, router, *matrices(w[2:], False), False, "silu", 2, 3)
    torch.testing.assert_close(found.cpu(), reference(x, table, router, w, experts=(2, 3)), atol=1e-4, rtol=1e-4)


def test_weights_must_have_the_dtype_of_tokens_in_the_old_version():
    x, table, router, w = draw()
    arguments = (x.bfloat16(), table, router, *matrices(w.bfloat16(), False), False, "silu", 0, EXPERTS - 1)
    if OLD and not LAZY:
        with card.refuses(RuntimeError, match="dtype"):
            without_gradients(*arguments)
    else:
        assert without_gradients(*arguments).dtype == torch.bfloat16


@ranged
def test_ids_beyond_the_range_may_repeat():
    if not range_is_seen("hpu", True, False):
        pytest.skip("the kernel does not look at the range")
    x, table, router, w = draw(requires_grad=True)
    found = torch.ops.hpu.mixture_of_experts(
        x, torch.full_like(table, EXPERTS), router, *matrices(w, False), False, "silu", 0, EXPERTS - 1
    )
    assert not found.cpu().any()


def test_the_keyword_of_newer_versions():
    x, table, router, w = draw()
    arguments = (x, table, router, *matrices(w, False), False, "silu", 0, EXPERTS - 1)
    if OLD:
        with card.refuses(RuntimeError, match=r"expected at most 10 argument\(s\) but received 11"):
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
    if len(experts) < EXPERTS and not range_is_seen("hpu", True, False):
        pytest.skip("the kernel does not look at the range")
    here = matrices(w[experts.start : experts.stop], True)
    card.reset_calls()
    out = torch.ops.hpu.mixture_of_experts(x, table, router, *here, True, "silu", experts.start, experts.stop - 1)
    card.assert_calls({f"hpu::mixture_of_experts{'' if DENSE else '_recomp_fwd'}": 1})
    leaves = [t.detach().cpu().requires_grad_() for t in (x, router, w)]
    right = reference(leaves[0], table, leaves[1], leaves[2], experts=experts)
    torch.testing.assert_close(out.cpu(), right, atol=1e-4, rtol=1e-4)
    grad = torch.randn(T, H)
    out.backward(grad.to("hpu"))
    right.backward(grad)
    for ours, leaf in zip((x, router, w), leaves, strict=True):
        torch.testing.assert_close(ours.grad.cpu(), leaf.grad, atol=1e-4, rtol=1e-4)


@ranged
def test_no_second_gradient():
    x, table, router, w = draw(requires_grad=True)
    out = torch.ops.hpu.mixture_of_experts(x, table, router, *matrices(w, False), False, "silu", 0, EXPERTS - 1)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    assert not grad.requires_grad
