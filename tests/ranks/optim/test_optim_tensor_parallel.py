"""Norms, sums over tp and tied copies with a hand-made tensor-parallel model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.comm.collectives import gather_sequence, local_shard, reduce_from_region
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.optim.core.config import DistributedOptimizerConfig
from lightning_megatron.optim.zero import ShardedOptimizer
from lightning_megatron.params import ParamSpec, named_specs

S, H, F = 4, 6, 10


class Toy(nn.Module):
    """A norm weight under sequence parallelism, a column and a row parallel matrix, a replicated bias."""

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.tp = mesh.tp
        self.scale = nn.Parameter(1 + 0.1 * torch.randn(H, generator=generator))
        self.up = nn.Parameter(local_shard(torch.randn(F, H, generator=generator), self.tp).clone())
        self.down = nn.Parameter(local_shard(torch.randn(H, F, generator=generator), self.tp, 1).clone())
        self.bias = nn.Parameter(torch.zeros(H))

    def param_specs(self) -> Mapping[str, ParamSpec]:
        return {
            "scale": ParamSpec((H,), grad_sum_over_tp=True, decay=False),
            "up": ParamSpec((F, H), tp_dim=0),
            "down": ParamSpec((H, F), tp_dim=1),
            "bias": ParamSpec((H,), decay=False),
        }

    def forward(self, x: Tensor) -> Tensor:  # [S, H]
        x = gather_sequence(local_shard(x, self.tp) * self.scale, self.tp)
        return reduce_from_region(torch.tanh(x @ self.up.T) @ self.down.T, self.tp) + self.bias


def train(tp: int, shard: bool, bucket_size: int) -> tuple[dict[str, Tensor], list[float], list[tuple[bool, bool]]]:
    single = ParallelMesh.single()
    mesh = single if tp == 0 else ParallelMesh.create(ParallelLayout(tp=tp), torch.device("cpu"))
    model = Toy(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    zero = ShardedOptimizer(
        optimizer, named_specs(model), mesh, DistributedOptimizerConfig(shard=shard, bucket_size=bucket_size)
    )
    zero.install_gather_hooks(model)
    generator = torch.Generator().manual_seed(1)
    norms = []
    for _ in range(10):
        x = torch.randn(4, S, H, generator=generator)
        zero.zero_grads()
        mine = list(range(mesh.dp.rank, 4, mesh.dp.size))
        for i in mine:
            zero.declare_last(i == mine[-1])
            (model(x[i]).square().mean() / len(mine)).backward()
        zero.finish_grad_sync()
        norms.append(float(zero.clip_by_norm(0.5)))
        optimizer.step()
        zero.start_param_gather()
    zero.finish_param_gather()
    kinds = [(b.key.replicated_over_tp, b.key.grad_sum_over_tp) for b in zero.buffers]
    return {name: p.detach().clone() for name, p in model.named_parameters()}, norms, kinds


@pytest.mark.parametrize("shard", [True, False])
@pytest.mark.parametrize(("world", "tp"), [(2, 2), (4, 2)])
def test_tensor_parallel_equals_one_process(ranks: Callable[..., list[Any]], world: int, tp: int, shard: bool) -> None:
    expected, expected_norms, _ = train(0, True, 10**9)
    for rank, (params, norms, kinds) in enumerate(ranks(world, train, tp, shard, 1)):
        assert norms == pytest.approx(expected_norms, rel=1e-6)
        assert sorted(kinds) == [(False, False), (True, False), (True, True)]
        part = rank % tp
        for name, dim in (("up", 0), ("down", 1), ("scale", None), ("bias", None)):
            want = expected[name] if dim is None else expected[name].chunk(tp, dim)[part]
            torch.testing.assert_close(params[name], want, rtol=2e-6, atol=1e-6)


def added_up(tp: int, shard: bool) -> dict[str, Tensor]:
    """Gradients of two rounds, each reduced, without a clearing between them."""
    single = ParallelMesh.single()
    mesh = single if tp == 0 else ParallelMesh.create(ParallelLayout(tp=tp), torch.device("cpu"))
    model = Toy(mesh)
    zero = ShardedOptimizer(
        torch.optim.SGD(model.parameters()), named_specs(model), mesh, DistributedOptimizerConfig(shard=shard)
    )
    x = torch.randn(2, S, H, generator=torch.Generator().manual_seed(1))
    zero.zero_grads()
    for part in x:
        zero.continue_accumulation()
        zero.declare_last()
        model(part).square().mean().backward()
        zero.finish_grad_sync()
    return dict(zero.gradients_of(lambda spec: True))


def test_gradients_that_are_added_to_reduced_ones_are_those_of_one_process(ranks: Callable[..., list[Any]]) -> None:
    expected = added_up(0, True)
    for rank, found in enumerate(ranks(2, added_up, 2, True)):
        for name, dim in (("up", 0), ("down", 1), ("scale", None), ("bias", None)):
            want = expected[name].view(F, H) if name == "up" else expected[name].view(H, -1)
            want = want if dim is None else want.chunk(2, dim)[rank]
            torch.testing.assert_close(found[name], want.flatten(), rtol=2e-6, atol=1e-6)


def tied_norms() -> tuple[float, float]:
    """Norm with a tied copy and without it; and a parameter whose gradient is changed after backward."""
    mesh = ParallelMesh.create(ParallelLayout(), torch.device("cpu"))
    model = nn.Module()
    model.first, model.copy = nn.Parameter(torch.full((70,), 3.0)), nn.Parameter(torch.full((5,), 4.0))
    specs = [
        ("first", model.first, ParamSpec((70,))),
        ("copy", model.copy, ParamSpec((5,), tied_with="elsewhere")),
    ]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = ShardedOptimizer(optimizer, specs, mesh, DistributedOptimizerConfig(bucket_size=1), reduce_late=["copy"])
    zero.declare_last()
    (model.first.square().sum() / 2 + model.copy.square().sum() / 2).backward()
    model.copy.grad.mul_(2)  # what a sum over tied copies would do
    zero.finish_grad_sync()
    norm = float(zero.grad_norm())
    optimizer.step()
    zero.start_param_gather()
    return norm, float(model.copy.detach()[4])


def test_a_tied_copy_is_updated_and_not_counted(ranks: Callable[..., list[Any]]) -> None:
    for norm, value in ranks(2, tied_norms):
        assert norm == pytest.approx(3 * 70**0.5, rel=1e-6)
        assert value == pytest.approx(4 - 0.1 * 8)
