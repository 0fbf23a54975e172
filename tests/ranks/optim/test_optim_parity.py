"""The sharded optimizer against plain torch on the whole batch in one process.

In fp64: a sum in another order is then within the bound on every processor, and a wrong scale is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.optim.buffers import bucket as bucket_module
from lightning_megatron.optim.core.config import DistributedOptimizerConfig
from lightning_megatron.optim.zero import ShardedOptimizer
from lightning_megatron.params import named_specs

STEPS, BATCH = 10, 24


@dataclass(frozen=True)
class Case:
    kind: str = "AdamW"
    shard: bool = True
    accumulate: int = 1
    overlap: bool = True
    bucket_size: int = 300
    clip: str | None = None
    alias_grads: bool | None = None
    reduce_dtype: torch.dtype | None = None
    unused: bool = True


class Net(nn.Module):
    def __init__(self, unused: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 17), nn.Tanh(), nn.LayerNorm(17), nn.Linear(17, 17), nn.Tanh())
        self.head = nn.Linear(17, 3)
        self.unused = nn.Linear(3, 5).requires_grad_(unused)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)) * self.frozen


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    extra = {"SGD": {"momentum": 0.9}, "AdamW": {"eps": 1e-6}}.get(kind, {})
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 5e-3}]
    return getattr(torch.optim, kind)(groups, lr=1e-2, **extra)


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [(draw(BATCH, 8), draw(BATCH, 3)) for _ in range(STEPS)]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


@cache
def plain(kind: str, clip: str | None) -> tuple[list[Tensor], list[float]]:
    model = Net()
    optimizer = make_optimizer(kind, model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    norms = []
    for x, y in batches():
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.3 if clip == "norm" else 1e9)))
        if clip == "value":
            nn.utils.clip_grad_value_(model.parameters(), 0.02)
        optimizer.step()
        scheduler.step()
    return [p.detach() for p in model.parameters()], norms


def make(case: Case, mesh: ParallelMesh) -> tuple[Net, torch.optim.Optimizer, ShardedOptimizer]:
    model = Net(case.unused)
    optimizer = make_optimizer(case.kind, model)
    zero = ShardedOptimizer(
        optimizer,
        named_specs(model),
        mesh,
        DistributedOptimizerConfig(
            shard=case.shard,
            overlap_grad_reduce=case.overlap,
            overlap_param_gather=case.overlap,
            bucket_size=case.bucket_size,
            alias_grads=case.alias_grads,
            reduce_dtype=case.reduce_dtype,
            main_dtype=torch.float64,
            grad_dtype=torch.float64,
        ),
    )
    zero.install_gather_hooks(model)
    return model, optimizer, zero


def step(
    case: Case, mesh: ParallelMesh, model: Net, optimizer: Any, zero: ShardedOptimizer, x: Tensor, y: Tensor
) -> float:
    mine = torch.arange(mesh.dp.rank, BATCH, mesh.dp.size).chunk(case.accumulate)
    zero.zero_grads()
    for micro in mine[:-1]:
        (loss_of(model, x[micro], y[micro]) / case.accumulate).backward()
    zero.declare_last()
    (loss_of(model, x[mine[-1]], y[mine[-1]]) / case.accumulate).backward()
    zero.finish_grad_sync()
    norm = zero.clip_by_norm(0.3 if case.clip == "norm" else 1e9)
    if case.clip == "value":
        zero.clip_by_value(0.02)
    optimizer.step()
    zero.start_param_gather()
    return float(norm)


def train(case: Case) -> tuple[list[Tensor], list[float]]:
    mesh = ParallelMesh.create(ParallelLayout(), torch.device("cpu"))
    model, optimizer, zero = make(case, mesh)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    norms = []
    for x, y in batches():
        norms.append(step(case, mesh, model, optimizer, zero, x, y))
        scheduler.step()
    zero.close()
    return [p.detach().clone() for p in model.parameters()], norms


def train_all(cases: list[Case]) -> list[tuple[list[Tensor], list[float]]]:
    return [train(case) for case in cases]


LAYOUTS = [
    Case(shard=shard, accumulate=accumulate, overlap=overlap, bucket_size=bucket_size)
    for shard in (True, False)
    for accumulate in (1, 3)
    for overlap in (True, False)
    for bucket_size in (1, 300, 10**9)
]


def assert_equals_plain(case: Case, params: list[Tensor], norms: list[float]) -> None:
    expected, expected_norms = plain(case.kind, case.clip)
    assert norms == pytest.approx(expected_norms, rel=1e-12), case
    for got, want in zip(params, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10, msg=lambda text: f"{case}: {text}")


@pytest.mark.parametrize("dp", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_way_to_communicate_equals_one_process(ranks: Callable[..., list[Any]], dp: int) -> None:
    for rank in ranks(dp, train_all, LAYOUTS):
        for case, (params, norms) in zip(LAYOUTS, rank, strict=True):
            assert_equals_plain(case, params, norms)


def test_optimizers_and_clipping_equal_one_process(ranks: Callable[..., list[Any]]) -> None:
    cases = [Case(kind=kind, clip=clip) for kind in ("AdamW", "SGD", "Adagrad") for clip in ("norm", "value")]
    cases += [Case(kind=kind) for kind in ("Adam", "RMSprop", "Adamax", "NAdam", "RAdam")]
    for rank in ranks(2, train_all, cases):
        for case, (params, norms) in zip(cases, rank, strict=True):
            assert_equals_plain(case, params, norms)


def test_where_torch_cannot_alias_gradients_nothing_changes(ranks: Callable[..., list[Any]]) -> None:
    cases = [Case(alias_grads=False, accumulate=a, clip="norm") for a in (1, 3)]
    for rank in ranks(2, train_all, cases):
        for case, (params, norms) in zip(cases, rank, strict=True):
            assert_equals_plain(case, params, norms)


def test_two_runs_are_bit_equal_with_and_without_overlap(ranks: Callable[..., list[Any]]) -> None:
    case = Case(accumulate=3)
    for rank in ranks(4, train_all, [case, case, replace(case, overlap=False)]):
        (first, norms), *others = rank
        for params, other_norms in others:
            assert norms == other_norms
            assert all(torch.equal(a, b) for a, b in zip(first, params, strict=True))


def test_reducing_in_bf16_is_close_and_not_equal(ranks: Callable[..., list[Any]]) -> None:
    case = Case(kind="SGD", reduce_dtype=torch.bfloat16)
    for shard in (True, False):
        [(_, norms)] = ranks(2, train_all, [replace(case, shard=shard)])[0]
        _, expected = plain(case.kind, case.clip)
        assert norms != pytest.approx(expected, rel=1e-6)
        assert norms == pytest.approx(expected, rel=1e-2)


def launches(case: Case) -> tuple[list[int], list[int]]:
    """Reductions sent by the end of each backward and of the step; elements of each, in the order they were sent."""
    mesh = ParallelMesh.create(ParallelLayout(), torch.device("cpu"))
    model, _, zero = make(case, mesh)
    counts = []
    sent = mock.Mock(wraps=bucket_module.start_reduce_scatter_into)
    with mock.patch.object(bucket_module, "start_reduce_scatter_into", sent):
        x, y = batches()[0]
        for _ in range(3):
            loss_of(model, x, y).backward()
            counts.append(sent.call_count)
        zero.declare_last()
        loss_of(model, x, y).backward()
        counts.append(sent.call_count)
        zero.finish_grad_sync()
        counts.append(sent.call_count)
    zero.close()
    return counts, [call.args[1].numel() for call in sent.call_args_list]


def test_only_the_last_micro_batch_communicates(ranks: Callable[..., list[Any]]) -> None:
    early, late = Case(bucket_size=1, unused=False), Case(bucket_size=1, overlap=False, unused=False)
    for counts, sizes in ranks(2, launches, early):
        assert counts == [0, 0, 0, 8, 8]  # one for each of 8 parameters, all while backward runs
        assert ranks(2, launches, late)[0] == ([0, 0, 0, 0, 8], sizes)  # in the same order


def test_a_parameter_nobody_reaches_only_delays_what_comes_after(ranks: Callable[..., list[Any]]) -> None:
    # `unused` is defined last, so its buckets are first in line; nothing overtakes them, and nothing hangs.
    for counts, _ in ranks(2, launches, Case(bucket_size=1)):
        assert counts == [0, 0, 0, 0, 10]


def late_gradient() -> str:
    mesh = ParallelMesh.create(ParallelLayout(), torch.device("cpu"))
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = ShardedOptimizer(optimizer, named_specs(model), mesh, DistributedOptimizerConfig(bucket_size=1))
    zero.declare_last()
    model(torch.ones(2, 4)).sum().backward()
    try:
        model(torch.ones(2, 4)).sum().backward()
    except RuntimeError as error:
        zero.finish_grad_sync()
        return str(error)
    return "no error"


def test_a_gradient_that_comes_too_late_is_an_error(ranks: Callable[..., list[Any]]) -> None:
    for text in ranks(2, late_gradient):
        assert "a second backward ran" in text
        assert "'bias'" in text or "'weight'" in text


def overflow() -> list[bool]:
    mesh = ParallelMesh.create(ParallelLayout(), torch.device("cpu"))
    seen = []
    for bad in (0.0, float("inf"), float("nan")):
        model = nn.Linear(4, 4)
        zero = ShardedOptimizer(
            torch.optim.SGD(model.parameters()), named_specs(model), mesh, DistributedOptimizerConfig(shard=False)
        )
        zero.declare_last()
        (model(torch.ones(2, 4)).sum() * 1.0).backward()
        zero.finish_grad_sync()
        if dist.get_rank() == 1:  # only one rank sees it: all must agree
            zero.main_params[0].grad[3] += bad
        seen.append(zero.found_inf())
    return seen


def test_all_ranks_agree_on_an_overflow(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(2, overflow) == [[False, True, True]] * 2
