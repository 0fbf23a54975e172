"""Models whose weights are all loaded once they are built: nothing is drawn for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from draws import Draws
from tiny import tiny_llama

from lightning_megatron import GPTModule
from lightning_megatron.layers.init import weights_follow
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.gpt import GPTModel


@pytest.mark.parametrize("experts", [{}, {"num_experts": 4}])
def test_numbers_that_are_drawn_later_are_the_same(experts: dict[str, int]) -> None:
    config, mesh = tiny_llama(**experts), ParallelMesh.single()
    torch.manual_seed(1)
    drawn, then = GPTModel(config, mesh), torch.rand(4)
    torch.manual_seed(1)
    with Draws() as draws, weights_follow():
        zero = GPTModel(config, mesh)
    assert torch.equal(torch.rand(4), then)
    assert draws.number == 0
    for (name, left), right in zip(drawn.named_parameters(), zero.parameters(), strict=True):
        assert torch.equal(right, left) or not right.any(), name


@pytest.mark.parametrize("strict", [True, False])
def test_a_module_draws_nothing_for_weights_that_it_has_been_given(strict: bool, tmp_path: Path) -> None:
    source = GPTModule(tiny_llama())
    source.configure_model()
    torch.save({"state_dict": source.state_dict(), "pytorch-lightning_version": "2.5.0"}, tmp_path / "one.ckpt")
    module = GPTModule(tiny_llama())
    module.load_weights(tmp_path / "one.ckpt", strict=strict)
    with Draws() as draws:
        module.configure_model()
    assert (draws.number == 0) is strict, "what the file lacks would stay as it was drawn"
    for (name, left), right in zip(source.named_parameters(), module.parameters(), strict=True):
        assert torch.equal(left, right), name
