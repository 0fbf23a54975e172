"""fp8 on several ranks: one scale for all of them, so that a layout changes only the order of sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.layers.fp8_linear import Fp8Steps, multiply_in_fp8
from lightning_megatron.layers.init import seeded
from lightning_megatron.layers.mlp import MLP
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.ops.activation import activation
from lightning_megatron.ops.fp8 import LINEAR_FP8, REFERENCE_KERNELS, Fp8Recipe
from lightning_megatron.testing.parity import assert_same

S, B, H, FFN = 16, 4, 32, 64


def two_steps(mesh: ParallelMesh, sequence_parallel: bool = False) -> dict[str, Tensor]:
    """Output and gradients of the second step, whose scales come from the first; this rank's part of them."""
    with seeded(11, 0):
        mlp = MLP(
            H,
            FFN,
            mesh,
            activation=activation("gelu"),
            bias=True,
            sequence_parallel=sequence_parallel,
            init_std=0.2,
            output_init_std=0.2,
        )
    selection = LINEAR_FP8.choose("cpu")
    recipe = Fp8Recipe(stochastic_rounding=False)  # each rank draws numbers of its own
    products = [multiply_in_fp8(linear, REFERENCE_KERNELS, recipe, selection) for linear in (mlp.fc1, mlp.fc2)]
    steps = Fp8Steps([mlp.fc1, mlp.fc2], mesh)
    out, x = torch.empty(0), torch.empty(0)
    for seed in (1, 2):
        mlp.zero_grad()
        x, dy = (torch.randn(S, B, H, generator=torch.Generator().manual_seed(seed + i)) for i in (0, 10))
        x, dy = (t.chunk(mesh.dp.size, 1)[mesh.dp.rank] for t in (x, dy))
        if sequence_parallel:
            x, dy = (t.chunk(mesh.tp.size)[mesh.tp.rank] for t in (x, dy))
        x = x.contiguous().requires_grad_()
        out = mlp(x)
        out.backward(dy)
        if seed == 1:
            steps.after_optimizer_step()
    assert x.grad is not None
    assert mlp.fc1.weight.grad is not None
    assert mlp.fc2.weight.grad is not None
    return {
        "scales": torch.stack([p.scale for p in products]),
        "out": out.detach(),
        "dx": x.grad,
        "dw1": mlp.fc1.weight.grad,
        "dw2": mlp.fc2.weight.grad,
    }


def on_ranks(layout: ParallelLayout) -> dict[str, Tensor]:
    mesh = ParallelMesh.create(layout, torch.device("cpu"))
    return two_steps(mesh, layout.uses_sequence_parallel)


def whole(parts: list[dict[str, Tensor]], dims: dict[str, int | None]) -> dict[str, Tensor]:
    joined = {name: torch.cat([p[name] for p in parts], dim) for name, dim in dims.items() if dim is not None}
    return joined | {name: parts[0][name] for name, dim in dims.items() if dim is None}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_ranks_compute_what_one_does(ranks: Any, sequence_parallel: bool) -> None:
    parts = ranks(2, on_ranks, ParallelLayout(tp=2, sequence_parallel=sequence_parallel))
    along = 0 if sequence_parallel else None
    found = whole(parts, {"scales": None, "out": along, "dx": along, "dw1": 0, "dw2": 1})
    assert_same(found, two_steps(ParallelMesh.single()), rtol=1e-5)
    assert torch.equal(parts[0]["scales"], parts[1]["scales"])


def test_data_parallel_ranks_have_the_scales_of_all_samples(ranks: Any) -> None:
    parts = ranks(2, on_ranks, ParallelLayout())
    found = whole(parts, {"scales": None, "out": 1, "dx": 1})
    for name in ("dw1", "dw2"):
        found[name] = parts[0][name] + parts[1][name]
    assert_same(found, two_steps(ParallelMesh.single()), rtol=1e-5)
    assert torch.equal(parts[0]["scales"], parts[1]["scales"])
