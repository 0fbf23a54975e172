"""The sharded optimizer through a checkpoint: the next steps are those of the run that was never interrupted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_megatron.checkpoint import load, local_tensors, model_state, optimizer_state, regrouped, save
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.optim.core.config import DistributedOptimizerConfig
from lightning_megatron.optim.zero import ShardedOptimizer
from lightning_megatron.params import named_specs, spec_registry


class Job:
    """A bf16 model with fp32 main values; all ranks see the same data, so that dp does not change the mathematics."""

    def __init__(self, shard: bool, seed: int = 0, lr: float = 0.5) -> None:
        self.mesh = ParallelMesh.create(ParallelLayout(), torch.device("cpu"))
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 7)).bfloat16()
        optimizer = torch.optim.AdamW(
            [{"params": list(self.model[0].parameters()), "weight_decay": 0.0}, {"params": self.model[2].parameters()}],
            lr=lr,
        )
        self.zero = ShardedOptimizer(
            optimizer, named_specs(self.model), self.mesh, DistributedOptimizerConfig(shard=shard, bucket_size=200)
        )
        self.shard = shard

    def train(self, steps: range) -> None:
        for i in steps:
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(i)).bfloat16()
            for group in self.zero.optimizer.param_groups:
                group["lr"] *= 0.5
            self.zero.zero_grads()
            self.zero.declare_last()
            self.model(x).float().square().mean().backward()
            self.zero.finish_grad_sync()
            self.zero.optimizer.step()
            self.zero.start_param_gather()
        self.zero.finish_param_gather()

    def state(self):
        named = zip(self.zero.optimizer.param_groups, self.zero.group_names(), strict=True)
        groups = [{k: v for k, v in group.items() if k != "params"} | {"params": names} for group, names in named]
        model = model_state(local_tensors(self.model), spec_registry(self.model), self.mesh)
        return model | optimizer_state(0, self.zero.param_shards(), self.mesh, groups, sharded=self.shard)

    def resume(self, path) -> None:
        self.zero.init_state()
        state = self.state()
        load(path, state, self.mesh, check="hashes")
        scalars, notes = regrouped(state["optimizer_0.param_groups"], self.zero.group_names())
        assert notes == []
        for group, saved in zip(self.zero.optimizer.param_groups, scalars, strict=True):
            group.update(saved)
        self.zero.refresh_params()

    def weights(self):
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def train_and_save(path, shard):
    job = Job(shard)
    job.train(range(3))
    save(path, job.state(), {}, job.mesh)
    job.train(range(3, 6))
    return job.weights()


def resume_and_train(path, shard):
    job = Job(shard, seed=1, lr=9.0)
    job.resume(path)
    job.train(range(3, 6))
    return job.weights()


@pytest.mark.parametrize(("before", "shard_before"), [(1, True), (2, True), (4, True), (2, False)])
def test_the_next_steps_are_bit_equal_after_any_change_of_dp(before, shard_before, tmp_path, ranks):
    path = tmp_path / "a.ckpt"
    right = ranks(before, train_and_save, path, shard_before)[0]
    for after, shard in ((1, True), (2, True), (4, True), (2, False)):
        for weights in ranks(after, resume_and_train, path, shard):
            assert all(torch.equal(weights[name], right[name]) for name in right), (after, shard)
