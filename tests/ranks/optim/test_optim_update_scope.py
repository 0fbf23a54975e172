"""Optimizers that look at whole parameters, and element-wise ones that torch does not bring, against plain torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.checkpoint import State, load, save
from lightning_megatron.checkpoint.tensors.keys import groups_key
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.errors import ConfigError
from lightning_megatron.lightning.checkpointing.trainer_state import (
    begin_optimizer,
    continue_optimizer,
    optimizer_part,
)
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.optim.core.config import DistributedOptimizerConfig
from lightning_megatron.optim.core.update_scope import UpdateScope, update_scope
from lightning_megatron.optim.zero import ShardedOptimizer
from lightning_megatron.params import named_specs

STEPS, BATCH = 6, 8


class Sign(torch.optim.Optimizer):
    """Lion (https://arxiv.org/abs/2302.06675), which no version of torch brings."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                moment = self.state[p].setdefault("moment", torch.zeros_like(p))
                p.mul_(1 - 0.1 * group["lr"]).sub_(moment.lerp(p.grad, 0.1).sign(), alpha=group["lr"])
                moment.lerp_(p.grad, 0.01)


class Lamb(torch.optim.Optimizer):
    """A layer's rate follows the norm of its weights (https://arxiv.org/abs/1904.00962); state in odd forms."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                rows = state.setdefault("rows", [torch.zeros(p.shape[0]), None])
                rows[0].add_(p.grad.flatten(1).square().sum(1) if p.ndim > 1 else p.grad.square())
                update = p.grad / (rows[0].sqrt() + 1e-3).view(-1, *[1] * (p.ndim - 1)) / group["step"]
                p.sub_(update, alpha=group["lr"] * float(p.norm() / (update.norm() + 1e-3)))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 17), nn.Tanh(), nn.Linear(17, 17), nn.Tanh(), nn.Linear(17, 3))


def matrices(kind: Callable[..., torch.optim.Optimizer], model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return kind([p for p in model.parameters() if p.ndim > 1], **options)


Make = Callable[[nn.Module], torch.optim.Optimizer]


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return matrices(torch.optim.Muon, model, lr=0.02)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=0.02)


def lamb(model: nn.Module) -> torch.optim.Optimizer:
    return Lamb([{"params": list(model[2].parameters()), "lr": 0.05}, {"params": model[0].parameters()}], lr=0.02)


def sign(model: nn.Module) -> torch.optim.Optimizer:
    return Sign(model.parameters(), lr=0.01)


WHOLE: list[Make] = [adafactor, lamb, sign] + ([muon] if hasattr(torch.optim, "Muon") else [])


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 8, generator=generator), torch.randn(BATCH, 3, generator=generator)


def plain(make: Make) -> list[Tensor]:
    model = net()
    optimizer = make(model)
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


class Job:
    """A model under the sharded optimizer, and its checkpoints."""

    def __init__(self, make: Make, shard: bool = False, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.mesh = ParallelMesh.create(ParallelLayout(), torch.device("cpu"))
        self.model, self.shard = net().to(dtype), shard
        self.optimizer = make(self.model)
        self.zero = ShardedOptimizer(
            self.optimizer, named_specs(self.model), self.mesh, DistributedOptimizerConfig(shard=shard, **options)
        )

    def train(self, steps: range) -> list[Tensor]:
        mine = slice(self.mesh.dp.rank, BATCH, self.mesh.dp.size)
        for step in steps:
            x, y = batch(step)
            self.zero.zero_grads()
            self.zero.declare_last()
            (self.model(x[mine].to(next(self.model.parameters()).dtype)) - y[mine]).square().mean().backward()
            self.zero.finish_grad_sync()
            self.zero.optimizer.step()
            self.zero.start_param_gather()
        self.zero.finish_param_gather()
        return [p.detach().clone() for p in self.model.parameters()]

    def part(self) -> dict[str, Any]:
        return optimizer_part(0, self.zero, self.mesh, self.shard)

    def save(self, path: Path) -> None:
        self.zero.init_state()
        save(path, self.part(), {}, self.mesh)

    def resume(self, path: Path) -> None:
        groups: State = {groups_key(0): None}
        load(path, groups, self.mesh, strict=False)
        begin_optimizer(self.zero, groups[groups_key(0)])
        state = self.part()
        load(path, state, self.mesh)
        continue_optimizer(0, self.zero, state)


def train_all(makes: list[Make]) -> list[list[Tensor]]:
    return [Job(make).train(range(STEPS)) for make in makes]


@pytest.mark.parametrize("dp", [1, 2])
def test_whole_parameters_train_as_in_plain_torch(ranks: Callable[..., list[Any]], dp: int) -> None:
    for rank in ranks(dp, train_all, WHOLE):
        for make, params in zip(WHOLE, rank, strict=True):
            for got, want in zip(params, plain(make), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 if make is not muon else 1e-3)


def bf16(make: Make) -> tuple[list[Tensor], list[Tensor]]:
    job = Job(make, dtype=torch.bfloat16)
    params = job.train(range(STEPS))
    mains = {shard.name: shard.main.view(shard.local_shape) for shard in job.zero.param_shards()}
    return params, [mains[name] for name, _ in job.model.named_parameters()]


def test_main_values_of_bf16_parameters_are_fp32_in_the_parameters_shape(ranks: Callable[..., list[Any]]) -> None:
    params, mains = ranks(1, bf16, adafactor)[0]
    assert [m.shape for m in mains] == [p.shape for p in params]
    for param, main, want in zip(params, mains, plain(adafactor), strict=True):
        assert main.dtype == torch.float32
        assert torch.equal(param, main.bfloat16())
        torch.testing.assert_close(main, want, rtol=0.05, atol=0.02)


def sharded_sign(vouched: list[Any]) -> list[Tensor]:
    job = Job(sign, shard=True, elementwise=vouched)
    assert job.zero.is_flat
    return job.train(range(STEPS))


@pytest.mark.parametrize("vouched", [["Sign"], [Sign], [f"{Sign.__module__}.Sign"]])
def test_an_optimizer_that_is_vouched_for_works_on_shards(ranks: Callable[..., list[Any]], vouched: list[Any]) -> None:
    for params in ranks(2, sharded_sign, vouched):
        for got, want in zip(params, plain(sign), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def begin(path: Path, make: Make, shard: bool, vouched: list[Any]) -> list[Tensor]:
    job = Job(make, shard, elementwise=vouched)
    job.train(range(3))
    job.save(path)
    return job.train(range(3, STEPS))


def go_on(path: Path, make: Make, shard: bool, vouched: list[Any]) -> list[Tensor]:
    job = Job(make, shard, elementwise=vouched)
    job.resume(path)
    return job.train(range(3, STEPS))


@pytest.mark.parametrize(("make", "shard", "vouched"), [(sign, True, ["Sign"]), *((make, False, []) for make in WHOLE)])
def test_their_state_goes_on_under_another_number_of_ranks(
    ranks: Callable[..., list[Any]], tmp_path: Path, make: Make, shard: bool, vouched: list[Any]
) -> None:
    right = ranks(2, begin, tmp_path / "a.ckpt", make, shard, vouched)[0]
    (again, _), (alone,) = (ranks(n, go_on, tmp_path / "a.ckpt", make, shard, vouched) for n in (2, 1))
    assert all(torch.equal(a, b) for a, b in zip(again, right, strict=True))
    for got, want in zip(alone, right, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 if make is not muon else 1e-3)


def refusal(make: Make, layout: ParallelLayout, shard: bool) -> str:
    mesh = ParallelMesh.create(layout, torch.device("cpu"))
    model = net()
    try:
        ShardedOptimizer(make(model), named_specs(model), mesh, DistributedOptimizerConfig(shard=shard))
    except ConfigError as error:
        return str(error)
    return ""


class Modes(Sign):
    def train(self) -> None: ...

    def eval(self) -> None: ...


def modes(model: nn.Module) -> torch.optim.Optimizer:
    return Modes(model.parameters(), lr=0.1)


class Lars(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def lars(model: nn.Module) -> torch.optim.Optimizer:
    return Lars(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("make", "layout", "shard", "words"),
    [
        (adafactor, {}, True, ["Adafactor", "updates whole parameters", "set distributed_optimizer=False"]),
        (adafactor, {"tp": 2}, True, []),  # no parameter here is cut over tp
        (lamb, {}, True, ["Lamb", "one element at a time", "elementwise_optimizers=['Lamb']", "=False"]),
        (lamb, {"tp": 2}, True, ["set tp=1"]),
        (lamb, {"pp": 2}, True, ["set pp=1"]),
        (lars, {}, True, ["Lars", "one element at a time"]),
        (modes, {}, True, ["train() and eval()", "distributed_optimizer=False"]),
        (modes, {}, False, []),
    ],
)
def test_where_ranks_hold_parts_the_text_says_what_to_set(
    ranks: Callable[..., list[Any]], make: Make, layout: dict[str, int], shard: bool, words: list[str]
) -> None:
    for text in ranks(2, refusal, make, ParallelLayout(**layout), shard):
        assert bool(text) is bool(words), text
        assert all(word in text for word in words), text


FOREIGN = [
    ("lion_pytorch", "Lion", {}),
    ("adan_pytorch", "Adan", {}),
    ("adabelief_pytorch", "AdaBelief", {"print_change_log": False}),
    ("pytorch_optimizer", "Lion", {}),
    ("pytorch_optimizer", "Adan", {}),
    ("pytorch_optimizer", "AdEMAMix", {}),
    ("pytorch_optimizer", "AdaBelief", {"rectify": True}),
]


def foreign(path: list[str], package: str, kind: str, options: dict[str, Any], model: nn.Module) -> Any:
    sys.path[:] = path
    return getattr(__import__(package), kind)(model.parameters(), lr=0.01, weight_decay=0.1, **options)


def train_foreign(path: list[str], shard: bool, packages: list[Any]) -> list[list[Tensor]]:
    jobs = [Job(partial(foreign, path, *package), shard=shard) for package in packages]
    assert all(job.zero.is_flat for job in jobs)
    return [job.train(range(STEPS)) for job in jobs]


def test_known_packages_train_on_shards_as_in_plain_torch(ranks: Callable[..., list[Any]]) -> None:
    packages = [entry for entry in FOREIGN if find_spec(entry[0])]
    if not packages:
        pytest.skip("none of them is installed")
    for rank in ranks(2, train_foreign, sys.path, True, packages):
        for package, params in zip(packages, rank, strict=True):
            for got, want in zip(params, plain(partial(foreign, sys.path, *package)), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, msg=partial("{}: {}".format, package))


def test_settings_that_look_at_a_whole_tensor_are_noticed() -> None:
    package = pytest.importorskip("pytorch_optimizer")
    params = [nn.Parameter(torch.ones(2, 2))]
    assert update_scope(package.Lion(params)) is UpdateScope.ELEMENT
    assert update_scope(package.Lion(params, use_gc=True)) is UpdateScope.MODEL
    assert update_scope(package.Adan(params, max_grad_norm=1.0)) is UpdateScope.MODEL
