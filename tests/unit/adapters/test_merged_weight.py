"""The weight that a layer multiplies by, an adapter included, is the one of its output."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron import LlamaModule, LoRA
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from tests.tiny import tiny_llama


def adapted(**options: Any) -> LlamaModule:
    """A model with adapters that have values, in fp64."""
    torch.manual_seed(0)
    module = LlamaModule(tiny_llama(), lora=LoRA(rank=2, alpha=6.0, **options))
    module.configure_model()
    for name, param in module.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(param, std=0.5)
    return module.double()


@pytest.mark.parametrize("options", [{}, {"rslora": True}, {"dora": True}], ids=str)
def test_outputs_are_products_with_it(options: dict[str, Any]) -> None:
    """The decoder of latent attention multiplies by that weight; everything else adds the adapter's own product."""
    layers = [x for x in adapted(**options).modules() if isinstance(x, ColumnParallelLinear | RowParallelLinear)]
    with_adapter = [layer for layer in layers if layer.lora is not None]
    assert with_adapter
    for layer in with_adapter:
        x = torch.randn(3, 2, layer.in_features, dtype=torch.float64)
        out: Tensor = layer(x)
        weight = layer.effective_weight.flatten(0, -2)  # [out, in]; of a gated layer two matrices
        assert not torch.allclose(weight, layer.weight.flatten(0, -2))
        torch.testing.assert_close(out.flatten(2), x @ weight.T, rtol=1e-5, atol=1e-5)  # lengths of DoRA are fp32
