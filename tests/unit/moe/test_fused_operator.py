"""Arguments of Gaudi's operator, against a stand-in with its schema: sum_k w act(x w1) (x w2) w3."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import library as operators

from lightning_megatron.ops.activation import swiglu
from lightning_megatron.ops.mixture_of_experts import (
    fused_operator_missing,
    mixture_of_experts_fused,
    mixture_of_experts_reference,
)

ARGUMENTS = (
    "(Tensor hidden_states, Tensor expert_routing_table, Tensor router_weights, Tensor[] w12, Tensor[] w3, "
    "bool permuted_weights, str activation, int experts_min, int experts_max"
)
T, K, H, FFN, HERE = 7, 2, 6, 4, 3


def stand_in(x, table, weights, w12, w3, permuted_weights, activation, experts_min, experts_max, **rest):
    assert permuted_weights
    assert activation == "silu"
    assert len(w12) == len(w3) == experts_max - experts_min + 1
    out = torch.zeros_like(x)
    for t in range(len(x)):
        for expert, weight in zip(table[t].tolist(), weights[t], strict=True):
            gate, up = w12[expert].chunk(2)  # as in eager mode, the range is not looked at
            out[t] += weight * ((F.silu(x[t] @ gate.t()) * (x[t] @ up.t())) @ w3[expert].t())
    return out


@pytest.mark.parametrize(("more", "has_gradients"), [("", False), (", *, bool? recomp=True", True)])
def test_the_operator_gets_local_ids_and_weights_of_zero_for_experts_elsewhere(more, has_gradients):
    assert fused_operator_missing()
    ops = operators.Library("hpu", "FRAGMENT")
    try:
        ops.define(f"mixture_of_experts.fused_weights{ARGUMENTS}{more}) -> Tensor")
        ops.impl("mixture_of_experts.fused_weights", stand_in, "CPU")
        assert (fused_operator_missing() is None) == has_gradients
        torch.manual_seed(1)
        x, experts, weights = torch.randn(T, H), torch.randint(8, (T, K)), torch.rand(T, K)
        fc1, fc2 = torch.randn(HERE, 2, FFN, H), torch.randn(HERE, H, FFN)
        right = mixture_of_experts_reference(x, experts, weights, fc1, fc2, swiglu, first=3)
        torch.testing.assert_close(mixture_of_experts_fused(x, experts, weights, fc1, fc2, swiglu, first=3), right)
    finally:
        del ops  # and with it the operator
        vars(torch.ops.hpu).pop("mixture_of_experts", None)  # an older torch keeps what it has looked up
