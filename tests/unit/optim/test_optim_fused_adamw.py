"""An AdamW that counts steps in its groups (Intel's) and torch's go on from each other's checkpoints.

The stand-in below does the arithmetic that the Gaudi's kernel is documented to do: eps is added to the root of a moment
whose bias is not corrected yet. So eps is tiny here; with a usual one the two differ, see docs/ops.md.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lightning_megatron.checkpoint import load, local_tensors, model_state, optimizer_state, regrouped, save, verify
from lightning_megatron.checkpoint.tensors.state_dict import shared_state
from lightning_megatron.errors import ConfigError
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.optim.core.config import DistributedOptimizerConfig
from lightning_megatron.optim.zero import ShardedOptimizer
from lightning_megatron.params import named_specs, spec_registry
from lightning_megatron.testing.parity import assert_same

EPS = 1e-30


class FusedAdamW(Optimizer):
    """Counts in the group, ``state["step"]`` stays 0."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0, bias_correction=True):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "bias_correction": bias_correction})
        self.moments_dtype = None

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            (beta1, beta2), lr = group["betas"], group["lr"]
            size = lr * math.sqrt(1 - beta2 ** group["step"]) / (1 - beta1 ** group["step"])
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    zeros = torch.zeros_like(p, dtype=self.moments_dtype or p.dtype)
                    state |= {"step": 0, "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                p.mul_(1 - lr * group["weight_decay"])
                p.sub_(size * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"]))


FusedAdamW.__module__ = "habana_frameworks.torch.hpex.optimizers.FusedAdamW"
KINDS: dict[str, Any] = {"torch": AdamW, "fused": FusedAdamW}


class Job:
    """A bf16 model with fp32 main values in one process."""

    def __init__(self, kind: str, seed: int = 0, lr: float = 0.05) -> None:
        self.mesh = ParallelMesh.single()
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 7)).bfloat16()
        groups = [
            {"params": list(self.model[0].parameters()), "weight_decay": 0.0},
            {"params": list(self.model[2].parameters()), "weight_decay": 0.1},
        ]
        optimizer = KINDS[kind](groups, lr=lr, betas=(0.8, 0.9), eps=EPS)
        self.zero = ShardedOptimizer(
            optimizer, named_specs(self.model), self.mesh, DistributedOptimizerConfig(bucket_size=200)
        )

    def train(self, steps: range) -> None:
        for i in steps:
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(i)).bfloat16()
            self.zero.zero_grads()
            self.zero.declare_last()
            self.model(x).float().square().mean().backward()
            self.zero.finish_grad_sync()
            self.zero.optimizer.step()
            self.zero.start_param_gather()
        self.zero.finish_param_gather()

    def state(self) -> dict[str, Any]:
        self.zero.init_state()
        named = zip(self.zero.group_settings(), self.zero.group_names(), strict=True)
        groups = [settings | {"params": names} for settings, names in named]
        model = model_state(local_tensors(self.model), spec_registry(self.model), self.mesh)
        return model | optimizer_state(0, self.zero.param_shards(), self.mesh, groups)

    def resume(self, path: Path) -> None:
        state = self.state()
        load(path, state, self.mesh)
        self.zero.load_group_settings(regrouped(state["optimizer_0.param_groups"], self.zero.group_names())[0])
        known = shared_state(state, 0)
        for shard in self.zero.param_shards():
            numbers = {name for name, value in shard.shared.items() if isinstance(value, int | float)}
            self.zero.load_shard_state(shard, shared={name: known[shard.name][name] for name in numbers})
        self.zero.refresh_params()

    def mains(self) -> dict[str, Tensor]:
        return {str(i): main.detach().clone() for i, main in enumerate(self.zero.main_params)}


@pytest.mark.parametrize("before", KINDS)
@pytest.mark.parametrize("after", KINDS)
def test_either_goes_on_where_the_other_stopped(before, after, tmp_path):
    first = Job(before)
    first.train(range(3))
    save(tmp_path / "a.ckpt", first.state(), {}, first.mesh)
    assert verify(tmp_path / "a.ckpt") == []
    second = Job(after, seed=1, lr=9.0)
    second.resume(tmp_path / "a.ckpt")
    second.train(range(3, 6))
    whole = Job("torch")
    whole.train(range(6))
    assert_same(second.mains(), whole.mains(), rtol=1e-6)


def test_a_checkpoint_of_either_has_the_same_words(tmp_path):
    words = []
    for kind in KINDS:
        job = Job(kind)
        job.train(range(2))
        state = job.state()
        words.append(set(state))
        assert {shared_state(state, 0)[name]["step"] for name, _ in job.model.named_parameters()} == {2.0}
        assert all("step" not in group for group in state["optimizer_0.param_groups"])
    assert words[0] == words[1]


def test_state_is_allocated_without_a_step_being_counted():
    job = Job("fused")
    before = job.mains()
    job.zero.init_state()
    assert [group["step"] for group in job.zero.optimizer.param_groups] == [0, 0]
    assert_same(job.mains(), before, rtol=0)
    job.train(range(2))
    untouched = Job("fused")
    untouched.train(range(2))
    assert_same(job.mains(), untouched.mains(), rtol=0)


def test_the_choice_of_a_kernel_is_not_taken_from_a_checkpoint():
    job = Job("torch")
    job.zero.load_group_settings([{"fused": True, "lr": 0.5}, {"fused": True, "lr": 0.25}])
    assert [(group["fused"], group["lr"]) for group in job.zero.optimizer.param_groups] == [(None, 0.5), (None, 0.25)]


def test_one_that_has_taken_steps_is_refused():
    model = nn.Linear(2, 2)
    optimizer = FusedAdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(ConfigError, match="has already taken steps"):
        ShardedOptimizer(optimizer, named_specs(model), ParallelMesh.single())
