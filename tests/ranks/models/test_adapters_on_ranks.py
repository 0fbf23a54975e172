"""Gradients of adapters of every kind of layer on two tensor-parallel ranks, against those of one process.

With DoRA, rounding of the norms reaches 5e-5 of the largest element; a sum left out is off by far more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_model_parity import LLAMA, VOCAB

from lightning_megatron.adapters.attach import Switch, attach, begin
from lightning_megatron.adapters.lora import LoRA
from lightning_megatron.adapters.targets import adapted_layers
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.families import family_for
from lightning_megatron.lightning.pretrained.parameter_specs import weight_shapes
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.testing.parity import differences, load_whole, whole_gradients

TARGETS = ("all-linear", "embed_tokens", "lm_head")
"""Column- and row-parallel layers, the embedding and the output layer."""


def adapted(mesh: ParallelMesh, lora: LoRA) -> GPTModel:
    torch.manual_seed(2)
    model = GPTModel(LLAMA, mesh)
    family, _ = family_for(LLAMA, None)
    attach(model, mesh, "a", lora, adapted_layers(family, LLAMA, lora, weight_shapes(LLAMA)), Switch("a"))
    return model


def wrong_gradients(layout: ParallelLayout) -> dict[str, Any]:
    mesh, alone, found = ParallelMesh.create(layout, torch.device("cpu")), ParallelMesh.single(), {}
    rows = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    for lora in (LoRA(3, targets=TARGETS), LoRA(3, targets=TARGETS, dora=True)):
        reference, model = adapted(alone, lora), adapted(mesh, lora)
        with torch.no_grad():
            for param in reference.parameters():
                if not param.any():  # one matrix of each adapter, without which the other has no gradient
                    param.add_(torch.randn_like(param), alpha=0.2)
                    param[VOCAB:] = 0.0  # padding of the vocabulary
        begin(reference)
        load_whole(model, dict(reference.named_parameters()), mesh)
        theirs, ours = {}, {}
        for each, place, grads in ((reference, alone, theirs), (model, mesh, ours)):
            each(rows[:, :-1], labels=rows[:, 1:]).backward()
            grads |= {name: grad for name, grad in whole_gradients(each, place).items() if ".lora." in name}
        assert all(grad.any() for grad in theirs.values())
        found |= {f"{name}, dora={lora.dora}": what for name, what in differences(ours, theirs, rtol=1e-4).items()}
    return found


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_gradients_of_adapters_are_those_of_one_process(
    ranks: Callable[..., list[Any]], sequence_parallel: bool
) -> None:
    assert ranks(2, wrong_gradients, ParallelLayout(tp=2, sequence_parallel=sequence_parallel)) == [{}, {}]
