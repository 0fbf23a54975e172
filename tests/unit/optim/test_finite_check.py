"""The check for NaN and infinity where its numbers are read a step later, as on an accelerator."""

from __future__ import annotations

import pytest
import torch
from aten_operators import Kernels
from torch import nn

from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.optim.core.config import DistributedOptimizerConfig
from lightning_megatron.optim.finite_check import FiniteCheck, NonFiniteError
from lightning_megatron.optim.zero import ShardedOptimizer
from lightning_megatron.params import named_specs


def checked(layers: int, monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Sequential, ShardedOptimizer, FiniteCheck]:
    """A model of one bucket a layer after a backward, and its check, which reads its numbers a step later."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))
    mesh, config = ParallelMesh.single(torch.device("cpu")), DistributedOptimizerConfig(bucket_size=16 * 16)
    optimizer = torch.optim.AdamW(model.parameters())
    sharded = ShardedOptimizer(optimizer, named_specs(model), mesh, config)
    check = FiniteCheck(sharded, dict(model.named_parameters()), mesh)
    monkeypatch.setattr(check, "_at_once", False)
    return model, sharded, check


def step(model: nn.Sequential, sharded: ShardedOptimizer, check: FiniteCheck, number: int) -> Kernels:
    """Backward and check of a step; the operators of the check."""
    sharded.zero_grads()
    loss = model(torch.ones(2, 16)).square().mean()
    loss.backward()
    with Kernels() as kernels:
        check.add_loss(loss)
        for buffer in sharded.buffers:
            for bucket in buffer.buckets:
                check._add_grads(bucket)
        check(lambda: number, torch.ones(()))
    return kernels


def test_a_bucket_costs_a_few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four for its gradients, and four for its main parameters; each took nine."""
    few, many = (checked(layers, monkeypatch) for layers in (4, 12))
    (fewer, more) = (sum(len(buffer.buckets) for buffer in sharded.buffers) for _, sharded, _ in (few, many))
    assert more - fewer == 8
    added = step(*many, 0).found - step(*few, 0).found
    assert added.total() <= 8 * (more - fewer), added


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", ["parameter", "gradient"])
def test_what_was_bad_is_named_a_step_later(monkeypatch: pytest.MonkeyPatch, kind: str, value: float) -> None:
    model, sharded, check = checked(4, monkeypatch)
    step(model, sharded, check, 0)
    if kind == "gradient":
        model[1].bias.register_hook(lambda grad: grad.index_fill(0, torch.tensor(3), value))
    else:
        model[1].bias.data[3] = value
    step(model, sharded, check, 1)
    with torch.no_grad():
        model[2].weight.fill_(float("nan"))  # what a step with bad gradients does to others
    with pytest.raises(NonFiniteError) as error:
        step(model, sharded, check, 2)
    named = "the gradient of '1.bias'" if kind == "gradient" else "parameter '1.bias'"
    assert str(error.value).startswith(f"step 1: {named} on rank 0 is NaN or infinite")


def test_large_values_are_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sum over a whole bucket exceeds the range of fp32."""
    _, sharded, check = checked(4, monkeypatch)
    for buffer in sharded.buffers:
        for bucket in buffer.buckets:
            bucket.grads.fill_(5e36)
            check._add_grads(bucket)
    check(lambda: 0, torch.ones(()))
    check.finish()
