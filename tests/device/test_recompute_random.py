"""Recomputation on the device draws the same random numbers again, also where torch does not keep the state."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron import device as devices
from lightning_megatron.recompute import recomputed
from lightning_megatron.rng import RNGStreams


@pytest.mark.parametrize("initialized", [False, True])
@pytest.mark.parametrize("stream", ["default", "tensor"])
def test_recomputation_drops_what_the_forward_dropped(
    monkeypatch: pytest.MonkeyPatch, stream: str, initialized: bool
) -> None:
    card = torch.device(devices.HPU.type, 0)
    layer, x = nn.Linear(8, 8).to(card), torch.randn(64, 8).to(card)
    rng = RNGStreams(card)
    rng.place(tp_rank=0)

    def function(x: Tensor) -> Tensor:
        with rng.tensor_parallel() if stream == "tensor" else nullcontext():
            return F.dropout(layer(x), 0.5)

    monkeypatch.setattr(torch.hpu, "_initialized", initialized)  # torch keeps the state where it finds True
    out = recomputed(function, x, rng=rng)
    torch.hpu.manual_seed(9)  # another draw in between
    out.sum().backward()
    assert layer.bias.grad.cpu().tolist() == (2 * (out != 0).sum(0)).float().cpu().tolist()
