"""Arguments of Gaudi's operator, against stand-ins with its schema and either kernel: sum_k w act(x w1) (x w2) w3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch import library as operators

from lightning_megatron.ops import mixture_of_experts as module
from lightning_megatron.ops.activation import swiglu
from lightning_megatron.ops.mixture_of_experts import (
    every_expert,
    fused_operator_missing,
    mixture_of_experts_fused,
    mixture_of_experts_reference,
)

ARGUMENTS = (
    "(Tensor hidden_states, Tensor expert_routing_table, Tensor router_weights, Tensor[] w12, Tensor[] w3, "
    "bool permuted_weights, str activation, int experts_min, int experts_max"
)
T, K, H, FFN, HERE, EXPERTS = 7, 2, 6, 4, 3, 8


class Kernel:
    """Stand-in that notes the rows it multiplies by each expert's matrices."""

    def __init__(self, takes_range: bool) -> None:
        self.takes_range = takes_range
        self.rows: list[int] = []

    def __call__(
        self, x: Tensor, table: Tensor, weights: Tensor, w12: list[Tensor], w3: list[Tensor], permuted_weights: bool,
        activation: str, experts_min: int, experts_max: int, **_: Any,
    ) -> Tensor:  # fmt: skip
        assert permuted_weights
        assert activation == "silu"
        assert weights.dtype == x.dtype
        assert len(w12) == len(w3) == experts_max - experts_min + 1
        if self.takes_range:
            where = table - experts_min
            for row in where.tolist():
                here = [e for e in row if 0 <= e < len(w3)]
                assert len(set(here)) == len(here), "an expert twice"
            of_expert = [weights.where(where == e, 0).sum(1) for e in range(len(w3))]
            self.rows = [int((where == e).sum()) for e in range(len(w3))]
        else:
            scale = x.new_zeros(len(x), len(w3)).scatter_(-1, table, weights)  # raises beyond the list, overwrites
            of_expert, self.rows = list(scale.unbind(1)), [len(x)] * len(w3)
        out = torch.zeros_like(x)
        for scale, joined, last in zip(of_expert, w12, w3, strict=True):
            gate, up = joined.chunk(2)
            out += scale[:, None] * ((F.silu(x @ gate.t()) * (x @ up.t())) @ last.t())
        return out


@contextmanager
def operator(kernel: Callable[..., Tensor], more: str) -> Iterator[None]:
    assert fused_operator_missing()
    ops = operators.Library("hpu", "FRAGMENT")
    try:
        ops.define(f"mixture_of_experts.fused_weights{ARGUMENTS}{more}) -> Tensor")
        ops.impl("mixture_of_experts.fused_weights", kernel, "CPU")
        module.range_is_seen.cache_clear()
        yield
    finally:
        module.range_is_seen.cache_clear()
        del ops  # and with it the operator
        vars(torch.ops.hpu).pop("mixture_of_experts", None)  # an older torch keeps what it has looked up


@pytest.mark.parametrize("takes_range", [False, True])
@pytest.mark.parametrize(("more", "has_gradients"), [("", False), (", *, bool? recomp=True", True)])
def test_either_kernel_gets_what_it_understands(more, has_gradients, takes_range):
    """Ids of all ranks' experts, and the one beyond them that stands for a choice that was dropped."""
    kernel = Kernel(takes_range)
    with operator(kernel, more):
        assert (fused_operator_missing() is None) == has_gradients
        torch.manual_seed(1)
        x, weights = torch.randn(T, H), torch.rand(T, K)
        experts = torch.stack([torch.randperm(EXPERTS)[:K] for _ in range(T)])
        experts[3] = EXPERTS
        fc1, fc2 = torch.randn(HERE, 2, FFN, H), torch.randn(HERE, H, FFN)
        right = mixture_of_experts_reference(x, experts, weights, fc1, fc2, swiglu, first=3)
        torch.testing.assert_close(mixture_of_experts_fused(x, experts, weights, fc1, fc2, swiglu, first=3), right)
    here = [int((experts == e).sum()) for e in range(3, 3 + HERE)]
    assert kernel.rows == (here if takes_range else [T] * HERE)


def test_every_expert_has_the_weights_of_its_own_choices_and_their_gradient():
    weights = torch.tensor([[0.25, 0.5], [1.0, 2.0]], requires_grad=True)
    table, dense = every_expert(torch.tensor([[2, 7], [4, 3]]), weights, here=3, first=2)
    assert table.tolist() == [[0, 1, 2]] * 2
    assert dense.tolist() == [[0.25, 0.0, 0.0], [0.0, 2.0, 1.0]]
    dense.sum().backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [[1.0, 0.0], [1.0, 1.0]]
