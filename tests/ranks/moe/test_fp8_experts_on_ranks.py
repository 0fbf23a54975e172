"""Experts in fp8 on several ranks: one scale for all of them, so that a layout changes only the order of sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.comm.collectives import local_shard
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.layers.fp8_linear import Fp8Steps, multiply_in_fp8
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.moe.layer import MoELayer
from lightning_megatron.ops.fp8 import LINEAR_FP8, REFERENCE_KERNELS, Fp8Recipe
from lightning_megatron.testing.parity import assert_same, load_whole, whole_gradients

S, B, H = 8, 4, 32
CONFIG = TransformerConfig(
    1, H, 2, 32, S, ffn_hidden_size=32, add_bias_linear=False, activation="swiglu", init_std=0.3, num_experts=4,
    moe_router_topk=2,
)  # fmt: skip


def two_steps(mesh: ParallelMesh) -> dict[str, Tensor]:
    """Output and gradients of the second step, whose scales come from the first."""
    torch.manual_seed(4)
    single = MoELayer(CONFIG, ParallelMesh.single(), sequence_parallel=False)
    layer = MoELayer(CONFIG, mesh, sequence_parallel=mesh.tp.size > 1)
    load_whole(layer, {name: p.detach() for name, p in single.named_parameters()}, mesh)
    selection, recipe = LINEAR_FP8.choose("cpu"), Fp8Recipe(stochastic_rounding=False)
    linears = list(layer.experts.grouped_linears().values())
    products = [multiply_in_fp8(linear, REFERENCE_KERNELS, recipe, selection, multiple=1) for linear in linears]
    steps, out = Fp8Steps(linears, mesh), torch.empty(0)
    for seed in (1, 2):
        layer.zero_grad()
        x, dy = (torch.randn(S, B, H, generator=torch.Generator().manual_seed(seed + i)) for i in (0, 10))
        x, dy = (local_shard(t.chunk(mesh.dp.size, 1)[mesh.dp.rank], mesh.tp).contiguous() for t in (x, dy))
        out = layer(x)[0]
        out.backward(dy)
        if seed == 1:
            steps.after_optimizer_step()
    gradients = {name: g for name, g in whole_gradients(layer, mesh).items() if "experts" in name}
    return {"scales": torch.stack([p.scale for p in products]), "out": out.detach(), **gradients}


def on_ranks(layout: ParallelLayout) -> dict[str, Tensor]:
    return two_steps(ParallelMesh.create(layout, torch.device("cpu")))


@pytest.mark.parametrize(
    ("layout", "along"),
    [(ParallelLayout(ep=2), 1), (ParallelLayout(tp=2), 0), (ParallelLayout(tp=2, ep=2, etp=1), 0)],
    ids=["ep", "etp", "tp and ep"],
)
def test_ranks_compute_what_one_does(ranks: Any, layout: ParallelLayout, along: int) -> None:
    parts = ranks(2, on_ranks, layout)
    right = two_steps(ParallelMesh.single())
    found = {**parts[0], "out": torch.cat([part["out"] for part in parts], along)}
    assert_same(found, right, rtol=1e-4)
    assert torch.equal(parts[0]["scales"], parts[1]["scales"])
