"""The passes of the loss in other ways, with the numbers of all rows at once: in units of rows, and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.layers import cross_entropy
from lightning_megatron.layers.cross_entropy import linear_cross_entropy
from lightning_megatron.mesh import Axis
from lightning_megatron.testing.parity import assert_same

TOKENS, WORDS, SIZE = 37, 19, 8


def loss_and_gradients(dtype: torch.dtype, smoothing: float, **options: Any) -> dict[str, Tensor]:
    options["label_smoothing"] = smoothing
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, SIZE, generator=generator).to(dtype).requires_grad_() for n in (TOKENS, WORDS + 5))
    labels = torch.randint(WORDS, (TOKENS,), generator=generator)
    weights = torch.rand(TOKENS, generator=generator) / TOKENS
    weights[3] = 0.0
    loss = linear_cross_entropy(hidden, weight, labels, weights, Axis("tp"), WORDS, **options)
    d_hidden, d_weight = torch.autograd.grad(loss, (hidden, weight))
    with torch.no_grad():
        without = linear_cross_entropy(hidden, weight, labels, weights, Axis("tp"), WORDS, **options)
    return {"loss": loss.detach(), "without gradients": without, "dx": d_hidden, "dw": d_weight}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("rows", [1, 5, 1000])
def test_units_of_any_number_of_rows_change_no_number(rows, smoothing, dtype, monkeypatch):
    monkeypatch.setattr(cross_entropy, "cache_bytes", lambda device: None)  # as on an accelerator
    whole = loss_and_gradients(dtype, smoothing)
    monkeypatch.setattr(cross_entropy, "cache_bytes", lambda device: 4 * WORDS * rows)
    units = loss_and_gradients(dtype, smoothing)
    losses = ("loss", "without gradients")
    assert_same({k: units[k] for k in losses}, {k: whole[k] for k in losses}, rtol=1e-6)
    assert torch.equal(units["dx"], whole["dx"])
    assert torch.equal(units["dw"], whole["dw"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_passes_that_are_compiled_change_no_number(softcap, smoothing, dtype):
    torch.compiler.reset()  # each case is a graph of its own, of which torch keeps eight
    plain = loss_and_gradients(dtype, smoothing, softcap=softcap)
    graph = loss_and_gradients(dtype, smoothing, softcap=softcap, backend="aot_eager")
    close = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps  # one rounding more or less
    for name, value in plain.items():
        error = (graph[name].double() - value.double()).norm() / value.double().norm()
        assert error < (1e-6 if name in ("loss", "without gradients") else close), name
