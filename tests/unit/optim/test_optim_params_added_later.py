"""A parameter that backward reaches later than others keeps a step count of its own, through checkpoints too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.checkpoint import load, save
from lightning_megatron.lightning.checkpointing.trainer_state import continue_optimizer, optimizer_part
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.optim.zero import ShardedOptimizer
from lightning_megatron.params import named_specs

MESH = ParallelMesh.single()


class Job:
    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.model = nn.ModuleDict({"early": nn.Linear(6, 2), "late": nn.Linear(6, 2)}).to(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)

    def shard(self) -> ShardedOptimizer:
        self.zero = ShardedOptimizer(self.optimizer, named_specs(self.model), MESH)
        return self.zero

    def train(self, steps: range) -> list[Tensor]:
        for step in steps:
            x = torch.randn(3, 6, generator=torch.Generator().manual_seed(step))
            self.optimizer.zero_grad()
            for name in ("early", "late") if step >= 2 else ("early",):
                part = self.model[name]
                part(x.to(part.weight.dtype)).square().sum().backward()
            self.optimizer.step()
        return [p.detach().clone() for p in self.model.parameters()]


def test_it_trains_as_in_plain_torch() -> None:
    ours, plain = Job(torch.float32), Job(torch.float32)
    ours.shard()
    for got, want in zip(ours.train(range(6)), plain.train(range(6)), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_and_goes_on_from_a_checkpoint_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    first, second = Job(dtype), Job(dtype)
    zero = first.shard()
    first.train(range(4))
    zero.init_state()
    save(tmp_path / "a.ckpt", optimizer_part(0, zero, MESH, True), {}, MESH)
    expected = first.train(range(4, 7))
    zero = second.shard()
    zero.init_state(split=True)
    state = optimizer_part(0, zero, MESH, True)
    load(tmp_path / "a.ckpt", state, MESH)
    continue_optimizer(0, zero, state)
    assert all(torch.equal(a, b) for a, b in zip(second.train(range(4, 7)), expected, strict=True))
