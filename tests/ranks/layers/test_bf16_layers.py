"""Parallel layers with bf16 parameters, on 1 and 2 ranks, against fp64 on whole tensors.

Inputs and parameters are the same bf16 numbers in both. A layer rounds its output once, and once more where ranks add
their parts: each changes an element by at most 2^-8 of itself, so that 2^-7 of the largest element holds all of it.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.comm.collectives import local_shard
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.layers import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.params import named_specs
from lightning_megatron.testing.parity import differences, load_whole, whole_gradients

S, B, H, FFN = 32, 2, 48, 64
TWO_ROUNDINGS = 2**-7


def check(layer: nn.Module, mesh: ParallelMesh, x: Tensor, cut_input: bool, cut_output: bool) -> dict[str, str]:
    """Differences from fp64: output, gradient of the input, gradient of each parameter."""
    generator = torch.Generator().manual_seed(5)
    params = {
        name: torch.randn(spec.global_shape, generator=generator).mul_(0.3).bfloat16()
        for name, _, spec in named_specs(layer)
    }
    truth = {name: p.double().requires_grad_() for name, p in params.items()}
    exact = x.double().requires_grad_()
    expected = F.linear(exact, truth["weight"].flatten(0, -2), truth["bias"].flatten())
    upstream = torch.randn(expected.shape, generator=generator).bfloat16()
    expected.backward(upstream.double())

    def output(t: Tensor) -> Tensor:
        return local_shard(t.unflatten(-1, (2, -1)), mesh.tp, -1).flatten(-2) if cut_output else t

    load_whole(layer, params, mesh)
    local = (local_shard(x, mesh.tp, -1) if cut_input else x).clone().requires_grad_()
    out = layer(local)
    out.backward(output(upstream))
    assert out.dtype == torch.bfloat16
    assert local.grad is not None
    assert exact.grad is not None
    input_gradient = local_shard(exact.grad, mesh.tp, -1) if cut_input else exact.grad
    return differences(
        {"output": out, "input gradient": local.grad, **whole_gradients(layer, mesh)},
        {"output": output(expected), "input gradient": input_gradient}
        | {name: p.grad for name, p in truth.items() if p.grad is not None},
        rtol=TWO_ROUNDINGS,
    )


def check_layers(tp: int, deferred: bool) -> dict[str, dict[str, str]]:
    mesh = ParallelMesh.create(ParallelLayout(tp=tp), torch.device("cpu"))
    mesh.weight_grads.enabled = deferred
    generator = torch.Generator().manual_seed(4)
    x, inner = (torch.randn(S, B, n, generator=generator).bfloat16() for n in (H, FFN))
    column = ColumnParallelLinear(H, FFN, mesh, blocks=2, dtype=torch.bfloat16)
    row = RowParallelLinear(FFN, H, mesh, dtype=torch.bfloat16)
    faults = {"column": check(column, mesh, x, False, True), "row": check(row, mesh, inner, True, False)}
    return {name: wrong for name, wrong in faults.items() if wrong}


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_bf16_layers_equal_fp64_but_for_their_roundings(ranks, tp, deferred):
    assert ranks(tp, check_layers, tp, deferred) == [{}] * tp
