"""What layers add to sums of gradients on CUDA: in fp32, in one order; and the loss that a compiler joins.

Needs a card: ``pytest -p lightning_megatron.testing.one_card --one-card tests/cuda``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lightning_megatron.layers.cross_entropy import linear_cross_entropy
from lightning_megatron.mesh import Axis
from lightning_megatron.ops.accumulate import add_, add_product_, add_rows_
from lightning_megatron.ops.grouped_linear import grouped_in_place, grouped_product
from lightning_megatron.testing import one_card
from lightning_megatron.weight_grad_store import GradPlace

pytestmark = pytest.mark.skipif(not one_card.enabled(), reason="needs a CUDA card and --one-card")


def sum_of(shape: tuple[int, ...], is_new: bool) -> GradPlace:
    return GradPlace(torch.full(shape, float("nan") if is_new else 1.0, device="cuda"), is_new)


def random(*shape: int, seed: int = 1, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def error(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right.double()).norm() / right.double().norm())


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_are_not_rounded_before_they_are_added(dtype: torch.dtype, is_new: bool) -> None:
    place, a, b = sum_of((96, 72), is_new), random(96, 200, dtype=dtype), random(200, 72, seed=2, dtype=dtype)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        add_product_(place, a, b)
    assert error(place.grad, a.double() @ b.double() + (0 if is_new else 1)) < 1e-6  # a rounding is 1e-3
    assert (
        sum(event.count for event in seen.key_averages() if event.self_device_time_total) <= 2
    )  # one, or split in two


@pytest.mark.parametrize("is_new", [True, False])
def test_values_are_scaled_in_fp32_while_they_are_added(is_new: bool) -> None:
    place, value = sum_of((300,), is_new), random(300)
    add_(place, value, torch.tensor(1 / 3, device="cuda"))
    assert error(place.grad, value.double() / 3 + (0 if is_new else 1)) < 1e-6


@pytest.mark.parametrize("is_new", [True, False])
def test_rows_that_repeat_are_added_in_one_order(is_new: bool) -> None:
    rows, values = torch.arange(4096, device="cuda") % 50, random(4096, 64)
    found = []
    for _ in range(3):
        place = sum_of((50, 64), is_new)
        add_rows_(place, rows, values)
        found.append(place.grad)
    right = torch.zeros(50, 64, dtype=torch.double, device="cuda").index_add_(0, rows, values.double())
    assert error(found[0], right + (0 if is_new else 1)) < 1e-6
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("function", [grouped_in_place, grouped_product])
def test_gradients_of_experts_are_added_to_their_sums(function: Any, is_new: bool) -> None:
    counts = [48, 0, 7, 73]
    x, weight = random(128, 64).requires_grad_(), random(4, 32, 64, seed=2).requires_grad_()
    grad, place = random(128, 32, seed=3), sum_of((4, 2, 16, 64), is_new)
    out = function(x, weight, counts, lambda: place)
    dx, none = torch.autograd.grad(out, (x, weight), grad, allow_unused=True)
    assert none is None
    wide_x, wide = (each.detach().double().requires_grad_() for each in (x, weight))
    right = torch.cat([rows @ w.t() for rows, w in zip(wide_x.split(counts), wide, strict=True)])
    right_dx, right_dw = torch.autograd.grad(right, (wide_x, wide), grad.double())
    assert error(out, right) < 4e-3
    assert error(dx, right_dx) < 4e-3
    assert error(place.grad.view_as(weight), right_dw + (0 if is_new else 1)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_passes_over_logits_are_few_kernels_when_compiled_and_change_no_number(dtype: torch.dtype) -> None:
    labels, weights = torch.arange(512, device="cuda") % 1000, torch.full((512,), 1 / 512, device="cuda")
    hidden, weight = random(512, 64, dtype=dtype), random(1024, 64, seed=2, dtype=dtype)

    def run(backend: str | None) -> list[Tensor]:
        given = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = linear_cross_entropy(*given, labels, weights, Axis("tp"), 1000, backend=backend)
        return [loss.detach(), *torch.autograd.grad(loss, given)]

    torch.compiler.reset()
    plain, graph = run(None), run("inductor")
    for found, right, close in zip(
        graph, plain, (1e-6, *(2 * [1e-5 if dtype == torch.float32 else 4e-3])), strict=True
    ):
        assert error(found, right) < close
    kernels = []
    for backend in (None, "inductor"):
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            run(backend)
        kernels.append(sum(event.count for event in seen.key_averages() if event.self_device_time_total))
    assert kernels[1] < kernels[0] - 5
