"""Optimizer, clipping and average of the bridge against torch's and against formulas."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import card
import pytest
import torch
from habana_frameworks.torch.hpex.movingavrg import FusedEMA
from habana_frameworks.torch.hpex.normalization import FusedClipNorm
from habana_frameworks.torch.hpex.optimizers import FusedAdamW
from habana_frameworks.torch.utils.internal import is_lazy
from torch import nn


def parameters(dtype=torch.float32):
    torch.manual_seed(4)
    return [nn.Parameter(torch.randn(5, 3).to("hpu", dtype)), nn.Parameter(torch.randn(7).to("hpu", dtype))]


def train(optimizer, params, steps=3):
    torch.manual_seed(5)
    for _ in range(steps):
        for p in params:
            p.grad = (torch.rand(p.shape) + 0.5).to("hpu", p.dtype)
        optimizer.step()
    return [p.detach().float().cpu() for p in params]


def largest_difference(ours, others):
    return max(float((a - b).abs().max()) for a, b in zip(ours, others, strict=True))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)], ids=str)
def test_three_steps_are_near_torchs(dtype, tolerance):
    ours, theirs = parameters(dtype), parameters(dtype)
    options = {"lr": 0.1, "eps": 1e-6, "weight_decay": 0.0}
    right = train(torch.optim.AdamW(theirs, **options), theirs)
    for a, b in zip(train(FusedAdamW(ours, **options), ours), right, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def test_its_own_formula_to_the_last_digits():
    params, (lr, (beta1, beta2), eps, decay) = parameters(), (0.01, (0.9, 0.99), 1e-3, 0.1)
    right = [p.detach().double().cpu() for p in params]
    m, v = [torch.zeros_like(w) for w in right], [torch.zeros_like(w) for w in right]
    torch.manual_seed(5)
    for t in range(1, 4):
        for i, w in enumerate(right):
            g = (torch.rand(w.shape) + 0.5).double()
            m[i] = beta1 * m[i] + (1 - beta1) * g
            v[i] = beta2 * v[i] + (1 - beta2) * g * g
            rate = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t)
            right[i] = w * (1 - lr * decay) - rate * m[i] / (v[i].sqrt() + eps)
    optimizer = FusedAdamW(params, lr, (beta1, beta2), eps, decay)
    assert largest_difference(train(optimizer, params), right) < 1e-6
    state = optimizer.state[params[0]]
    assert optimizer.param_groups[0]["step"] == 3  # counted in the group
    assert (state["step"], set(state)) == (0, {"step", "exp_avg", "exp_avg_sq"})


def test_epsilon_weighs_more_than_in_torch():
    gaps = []
    for eps in (1e-3, 1e-6, 1e-12):
        ours, theirs = parameters(), parameters()
        options = {"lr": 0.01, "eps": eps, "weight_decay": 0.0}
        gaps.append(
            largest_difference(
                train(FusedAdamW(ours, **options), ours), train(torch.optim.AdamW(theirs, **options), theirs)
            )
        )
    assert all(a > b for a, b in pairwise(gaps))
    assert gaps[0] > 1e-4
    assert gaps[2] < 1e-7


def test_a_usual_decay_is_lost_in_bf16():
    found = []
    for decay in (0.0, 0.1):
        params = parameters(torch.bfloat16)
        found.append(train(FusedAdamW(params, lr=1e-3, weight_decay=decay), params))
    assert largest_difference(*found) == 0


def test_moments_in_a_type_of_their_own():
    params = parameters()
    optimizer = FusedAdamW(params, lr=0.1, moments_dtype=torch.bfloat16)
    exact = parameters()
    right = train(FusedAdamW(exact, lr=0.1), exact)
    for a, b in zip(train(optimizer, params), right, strict=True):
        torch.testing.assert_close(a, b, atol=4e-2, rtol=4e-2)
    assert optimizer.state[params[0]]["exp_avg"].dtype == torch.bfloat16


def test_a_closure_is_called_first_and_gives_the_loss():
    (p, _) = parameters()
    optimizer = FusedAdamW([p])

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    before = float(p.detach().square().sum())
    assert float(optimizer.step(closure).detach()) == before
    assert float(p.detach().square().sum()) < before


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": -1.0}, r"Invalid learning rate: -1.0 - should be >= 0.0"),
        ({"betas": (0.9, 1.0)}, r"Invalid beta parameter: 1.0 - should be in \[0.0, 1.0\["),
        ({"eps": -1.0}, r"Invalid epsilon value: -1.0 - should be >= 0.0"),
    ],
)
def test_what_adamw_refuses(options, text):
    with card.refuses(ValueError, match=text):
        FusedAdamW(parameters(), **options)


def test_sparse_gradients_are_refused():
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3).to_sparse()
    with card.refuses(RuntimeError, match="Adam does not support sparse gradients, please consider SparseAdam"):
        FusedAdamW([p]).step()


def test_what_the_op_refuses():
    one = torch.ones(1, device="hpu")
    decay = (1.0,) if is_lazy() else (one, False)
    with card.refuses(RuntimeError, match="optimizer_adamw : can not process empty weight vector"):
        torch.ops.hpu.optimizer_adamw([], [], [], [], one, 0.9, 0.9, 1e-6, *decay)
    with card.refuses(
        RuntimeError,
        match="All 4 vector inputs must have the same number of elements but they respectively have: 1, 1, 1, 2",
    ):
        torch.ops.hpu.optimizer_adamw([one], [one], [one], [one, one], one, 0.9, 0.9, 1e-6, *decay)


@pytest.mark.parametrize("largest", [0.5, 1000.0])
def test_clipping_by_the_local_norm(largest):
    params = parameters()
    for p in params:
        p.grad = torch.randn_like(p)
    before = torch.cat([p.grad.flatten() for p in params]).cpu()
    norm = FusedClipNorm(params, largest).clip_norm(params)
    assert float(norm) == pytest.approx(float(before.norm()))
    after = torch.cat([p.grad.flatten() for p in params]).cpu()
    torch.testing.assert_close(after, before * min(1.0, largest / (float(before.norm()) + 1e-6)))


def test_nothing_to_clip():
    assert float(FusedClipNorm([], 1.0).clip_norm(parameters())) == 0.0


def test_the_average_starts_fast_and_slows_down():
    torch.manual_seed(6)
    model = nn.Linear(3, 2).to("hpu")
    average = FusedEMA(model, decay=0.9)
    right = copy.deepcopy(model.weight.detach())
    for n in range(1, 4):
        with torch.no_grad():
            model.weight.add_(1.0)
        average.update(model)
        kept = 0.9 * (1 - math.exp(-n / 2000))
        right = kept * right + (1 - kept) * model.weight.detach()
    torch.testing.assert_close(average.ema.weight, right)
    with card.refuses(ValueError, match=r"Invalid decay value: 2\.0"):
        FusedEMA(model, decay=2.0)
