"""Routing and its losses against formulas and Hugging Face's Mixtral."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from lightning_megatron.config.moe import MoEConfig
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.moe.aux_loss import attach_aux_loss, count_tokens, load_balancing_loss, z_loss
from lightning_megatron.moe.router import Router
from lightning_megatron.stage import BackwardScale

S, B, H, E, K = 6, 3, 8, 5, 2


def router_of(**fields):
    torch.manual_seed(0)
    config = MoEConfig(num_experts=E, moe_router_topk=fields.pop("topk", K), **fields)
    router = Router(H, config, ParallelMesh.single(), sequence_parallel=False, init_std=1.0)
    return router, torch.randn(S, B, H)


def test_weights_are_the_softmax_over_the_chosen_or_over_all():
    router, x = router_of()
    logits = F.linear(x, router.weight).flatten(0, 1)
    values, ids = logits.topk(K)
    routing = router(x)
    assert torch.equal(routing.experts, ids)
    torch.testing.assert_close(routing.weights, values.softmax(-1))
    # Hugging Face's way round: softmax over all, then the chosen, renormalized.
    probs = logits.softmax(-1).gather(-1, ids)
    torch.testing.assert_close(routing.weights, probs / probs.sum(-1, keepdim=True))

    router, x = router_of(moe_router_pre_softmax=True, moe_router_scaling_factor=2.5)
    torch.testing.assert_close(router(x).weights, 2.5 * probs)


def test_the_bias_chooses_and_the_score_without_it_weighs():
    router, x = router_of(moe_router_score="sigmoid", moe_expert_bias_update_rate=0.001)
    router.expert_bias[3] = 100.0
    scores = F.linear(x, router.weight).flatten(0, 1).sigmoid()
    routing = router(x)
    assert (routing.experts == 3).any(-1).all()
    chosen = scores.gather(-1, routing.experts)
    torch.testing.assert_close(routing.weights, chosen / chosen.sum(-1, keepdim=True))


def test_the_bias_follows_the_load():
    router, x = router_of(moe_router_score="sigmoid", moe_expert_bias_update_rate=0.125)
    counts = count_tokens(router(x).experts, E).float()
    router(x)  # a second micro-batch of the same step
    router.after_optimizer_step()
    assert router.expert_bias.tolist() == (0.125 * (counts.mean() - counts).sign()).tolist()
    before = router.expert_bias.clone()
    router.eval()
    router(x)
    router.after_optimizer_step()
    assert torch.equal(router.expert_bias, before), "what validation sees does not move it"


def formula(probs, experts):
    """coeff E sum_e(count_e sum_t p_te) / (k T^2), term by term."""
    tokens = len(probs)
    total = 0.0
    for e in range(E):
        total += (experts == e).sum().item() * probs[:, e].sum().item()
    return E * total / (K * tokens**2)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_aux_loss_is_the_formula(score):
    router, x = router_of(moe_router_score=score, moe_aux_loss_coeff=0.25)
    routing = router(x)
    logits = F.linear(x, router.weight).flatten(0, 1)
    probs = logits.softmax(-1) if score == "softmax" else logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    assert routing.aux_loss.item() == pytest.approx(0.25 * formula(probs.detach(), routing.experts), rel=1e-6)


def test_the_aux_loss_is_hugging_faces_over_k():
    router, x = router_of(moe_aux_loss_coeff=0.5)
    logits = F.linear(x, router.weight).flatten(0, 1)
    theirs = load_balancing_loss_func((logits,), E, K)
    assert router(x).aux_loss.item() == pytest.approx(0.5 * theirs.item() / K, rel=1e-6)


def test_the_sequence_loss_is_the_mean_of_the_formula_over_sequences():
    router, x = router_of(moe_aux_loss_coeff=1.0, moe_load_balancing="seq_aux_loss")
    routing = router(x)
    probs = F.linear(x, router.weight).softmax(-1).detach()
    experts = routing.experts.view(S, B, K)
    expected = sum(formula(probs[:, b], experts[:, b]) for b in range(B)) / B
    assert routing.aux_loss.item() == pytest.approx(expected, rel=1e-6)


def test_the_global_loss_uses_the_mean_counts_of_the_batch_so_far():
    router, x = router_of(moe_aux_loss_coeff=1.0, moe_load_balancing="global_aux_loss")
    y = torch.randn(S, B, H)
    first, second = router(x), router(y)
    probs = F.linear(y, router.weight).flatten(0, 1).softmax(-1)
    mean = (count_tokens(first.experts, E) + count_tokens(second.experts, E)).float() / 2
    expected = load_balancing_loss(probs, mean, S * B, K)
    assert second.aux_loss.item() == pytest.approx(expected.item(), rel=1e-6)
    router.after_optimizer_step()
    assert router(x).aux_loss.item() == pytest.approx(first.aux_loss.item(), rel=1e-6), "a new batch begins"


def test_the_z_loss_is_the_mean_square_of_logsumexp():
    router, x = router_of(moe_z_loss_coeff=0.125)
    logits = F.linear(x, router.weight)
    assert router(x).aux_loss.item() == pytest.approx(0.125 * logits.logsumexp(-1).square().mean().item(), rel=1e-6)
    assert z_loss(logits, S * B).item() == pytest.approx(logits.logsumexp(-1).square().mean().item(), rel=1e-6)


def test_an_even_load_costs_1():
    experts = torch.tensor([[0, 1], [2, 3], [4, 0], [1, 2], [3, 4]])
    loss = load_balancing_loss(torch.full((5, E), 1 / E), count_tokens(experts, E), 5, K)
    assert loss.item() == pytest.approx(1.0)


def test_no_aux_loss_outside_training():
    router, x = router_of(moe_aux_loss_coeff=0.25, moe_z_loss_coeff=0.1, moe_input_jitter_eps=0.5)
    router.eval()
    assert router(x).aux_loss is None
    assert torch.equal(router(x).weights, router(x).weights), "and no jitter"
    router.train()
    assert not torch.equal(router(x).weights, router(x).weights)
    with torch.no_grad():
        assert router(x).aux_loss == 0, "in its place"


def test_attached_losses_are_differentiated_and_not_seen():
    loss, extra = torch.tensor(2.0, requires_grad=True), torch.tensor(5.0, requires_grad=True)
    out = attach_aux_loss(loss, extra)
    assert out.item() == 2.0
    (3 * out).backward()
    assert (loss.grad.item(), extra.grad.item()) == (3.0, 3.0)
    hidden, extra = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True), torch.tensor(5.0, requires_grad=True)
    attach_aux_loss(hidden, extra, BackwardScale(0.3)).backward(torch.full((2, 3), 7.0, dtype=torch.bfloat16))
    assert extra.grad.item() == pytest.approx(0.3)
    assert (hidden.grad == 7).all()


@given(st.integers(1, 6), st.integers(1, 9), st.data())
def test_counts_are_those_of_bincount(experts, tokens, data):
    ids = data.draw(st.lists(st.integers(0, experts), min_size=2 * tokens, max_size=2 * tokens))
    chosen = torch.tensor(ids).view(tokens, 2)
    assert count_tokens(chosen, experts).tolist() == [ids.count(e) for e in range(experts)]
