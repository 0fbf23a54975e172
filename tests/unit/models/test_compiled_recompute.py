"""Recomputation inside of compiled blocks: one graph, gradients and memory as without the compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from tracing import compiled

from lightning_megatron.config.recompute_plan import RecomputePlan
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.models.presets import configuration

SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 61, "vocab_multiple": 4}
TOKENS = torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(1))


def trained(recompute: Any, *, compiles: bool, **fields: Any) -> tuple[dict[str, Tensor], int]:
    """Gradients of one step, and the bytes that its forward has saved."""
    torch.manual_seed(3)
    model = GPTModel(configuration("llama-tiny", **SIZES, **fields), recompute=RecomputePlan(recompute))
    for block in model.layers.values() if compiles else ():
        block.compile(backend="aot_eager", dynamic=False)
    saved: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        if not isinstance(x, torch.nn.Parameter):
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        loss = model(TOKENS, labels=TOKENS)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, sum(saved.values())


ALONE = (["mlp"], ["attention"])


@pytest.mark.parametrize(
    "recompute",
    [
        "selective",
        ["core_attn", "mlp"],
        ["attention", "mlp"],
        *(pytest.param(part, marks=pytest.mark.slow) for part in ALONE),
    ],
    ids=str,
)
def test_recomputed_parts_stay_in_the_graph(recompute: Any) -> None:
    expected, _ = trained(recompute, compiles=False)
    (whole, most), *_ = compiled(trained, None, compiles=True)
    (found, least), graphs, breaks = compiled(trained, recompute, compiles=True)
    assert not breaks
    assert graphs == 1, "the blocks are equal and share it"
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=name)
        torch.testing.assert_close(whole[name], gradient, msg=name)
    assert least < most, "less is kept than without recomputation"


def test_dropout_in_a_recomputed_part_stays_outside() -> None:
    torch.manual_seed(4)
    expected, _ = trained("selective", compiles=False, attention_dropout=0.2)
    torch.manual_seed(4)
    (found, _), graphs, breaks = compiled(trained, "selective", compiles=True, attention_dropout=0.2)
    assert breaks
    assert graphs > 1
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=name)
