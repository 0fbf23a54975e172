"""Tiny models of every family on a simulated HPU: losses and all gradients as on a CPU, by the device's kernels."""

from __future__ import annotations

from typing import Any

import pytest
import simulated_gaudi as hpu
import torch

from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.ops.implementation import REFERENCE
from lightning_megatron.ops.registry import Ops, choices_of
from lightning_megatron.testing.parity import assert_same
from tests.families import TINY, our_config, tokens_of

BY_BLOCKS = {"bloom": "ALiBi", "mistral": "a window of 5", "gemma2": "scores capped at 1.5", "gpt_oss": "sinks"}
BY_BLOCKS |= dict.fromkeys(("deepseek_v2", "deepseek_v3"), "values of 5 features, and keys of 10")
"""What Intel's attention cannot take, of some layers at least."""


def random_model(config: Any, ops: Ops) -> GPTModel:
    """A model with all parameters drawn at random."""
    torch.manual_seed(0)
    model = GPTModel(config, ops=ops)
    for name, param in model.named_parameters():
        torch.nn.init.normal_(param, mean=float("norm" in name and not config.norm_zero_centered), std=0.15)
    return model


@pytest.mark.parametrize("family", TINY)
def test_losses_and_gradients_are_those_of_a_cpu(family: str) -> None:
    config = our_config(TINY[family], moe_dynamic=bool(our_config(TINY[family]).num_experts))
    tokens = tokens_of(2, 13)
    found = []
    hpu.reset_calls()
    for device in ("cpu", "hpu"):
        model = random_model(config, Ops(device)).to(device)
        loss = model(tokens.to(device), tokens.roll(-1, 1).to(device))
        loss.backward()
        gradients = {name: param.grad.cpu() for name, param in model.named_parameters() if param.grad is not None}
        assert len(gradients) == len(list(model.parameters()))
        found.append({"loss": loss.detach().cpu(), **gradients})
    assert_same(found[1], found[0], rtol=2e-5)
    choices = [choice for of_module in choices_of(model).values() for choice in of_module]
    reasons = " ".join(reason for choice in choices for reason in choice["fallbacks"])
    calls = " ".join(hpu.calls())
    assert BY_BLOCKS.get(family, "") in reasons
    assert ("rms_norm" in calls) == (config.norm == "rmsnorm")
    has_operator = any(c["op"] == "mixture_of_experts" and c["chosen"] != REFERENCE for c in choices)
    assert ("mixture_of_experts" in calls) == (has_operator and not config.moe_linear_bias)
    assert ("experts have biases" in reasons) == (has_operator and config.moe_linear_bias)
