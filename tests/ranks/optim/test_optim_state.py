"""Optimizer state of each rank, its description, and loading it into another layout of buckets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.optim.core.config import DistributedOptimizerConfig
from lightning_megatron.optim.zero import ShardedOptimizer
from lightning_megatron.params import named_specs


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 30)).to(dtype)


def run(zero: ShardedOptimizer, model: nn.Module, steps: range) -> None:
    for i in steps:
        generator = torch.Generator().manual_seed(100 * i + dist.get_rank())
        zero.zero_grads()
        zero.declare_last()
        dtype = next(model.parameters()).dtype
        model(torch.randn(4, 64, generator=generator).to(dtype)).float().square().mean().backward()
        zero.finish_grad_sync()
        zero.optimizer.step()
        zero.start_param_gather()
    zero.finish_param_gather()


def state_bytes(shard: bool, dtype: torch.dtype) -> int:
    mesh = ParallelMesh.create(ParallelLayout(), torch.device("cpu"))
    model = net(dtype)
    zero = ShardedOptimizer(
        torch.optim.AdamW(model.parameters()), named_specs(model), mesh, DistributedOptimizerConfig(shard=shard)
    )
    zero.init_state()
    return zero.state_bytes


def test_optimizer_state_shrinks_with_data_parallel_ranks(ranks: Callable[..., list[Any]]) -> None:
    elements = sum(p.numel() for p in net().parameters())
    print("\nbytes of optimizer state on a rank\n  dp  fp32   bf16-mixed  bf16-mixed, not sharded")
    whole = ranks(1, state_bytes, True, torch.bfloat16)[0]
    assert whole == pytest.approx(12 * elements, rel=0.02)  # main, exp_avg, exp_avg_sq; a little padding
    for dp in (1, 2, 4, 8):
        fp32, mixed, replicated = (
            ranks(dp, state_bytes, shard, dtype)
            for shard, dtype in ((True, torch.float32), (True, torch.bfloat16), (False, torch.bfloat16))
        )
        print(f"  {dp:2}  {max(fp32):6}  {max(mixed):6}      {max(replicated):6}")
        assert max(mixed) == pytest.approx(whole / dp, rel=0.05)
        assert max(fp32) == pytest.approx(whole / dp * 2 / 3, rel=0.05)  # the parameters are their own main values
        assert max(replicated) == pytest.approx(whole, rel=0.05)


def assembled(zero: ShardedOptimizer) -> dict[str, dict[str, Tensor]]:
    """Whole parameters and their state, from the pieces of all ranks."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, zero.param_shards())
    whole: dict[str, dict[str, Tensor]] = {}
    for shard in (shard for rank in gathered for shard in rank):
        size = torch.Size(shard.local_shape).numel()
        into = whole.setdefault(shard.name, {})
        for name, value in {"main": shard.main, **shard.state}.items():
            target = into.setdefault(name, torch.full((size,), torch.nan))
            assert target[shard.start : shard.end].isnan().all(), "two ranks hold the same element"
            target[shard.start : shard.end] = value
        into["step"] = shard.shared["step"]
    return whole


def save_and_resume(dtype: torch.dtype) -> None:
    mesh = ParallelMesh.create(ParallelLayout(), torch.device("cpu"))
    model = net(dtype)
    zero = ShardedOptimizer(
        torch.optim.AdamW(model.parameters()), named_specs(model), mesh, DistributedOptimizerConfig(bucket_size=1000)
    )
    run(zero, model, range(3))
    saved = assembled(zero)
    assert set(saved) == {name for name, _ in model.named_parameters()}
    assert not any(value.isnan().any() for state in saved.values() for value in state.values())
    run(zero, model, range(3, 6))

    other = net(dtype)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    fresh = ShardedOptimizer(
        torch.optim.AdamW(other.parameters()), named_specs(other), mesh, DistributedOptimizerConfig(bucket_size=7000)
    )
    fresh.init_state()
    for shard in fresh.param_shards():
        of = {name: value[shard.start : shard.end] for name, value in saved[shard.name].items() if name != "step"}
        main = of.pop("main")
        fresh.load_shard_state(shard, main, of, {"step": saved[shard.name]["step"]})
    fresh.refresh_params()
    run(fresh, other, range(3, 6))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_goes_on_bit_equal_in_other_buckets(ranks: Callable[..., list[Any]], dtype: torch.dtype) -> None:
    ranks(2, save_and_resume, dtype)


def close_and_go_on() -> None:
    mesh = ParallelMesh.create(ParallelLayout(), torch.device("cpu"))
    model = net(torch.bfloat16)
    users = list(model.parameters())
    optimizer = torch.optim.AdamW(users)
    for _ in range(2):  # fit twice, with the same objects
        zero = ShardedOptimizer(optimizer, named_specs(model), mesh, DistributedOptimizerConfig(bucket_size=1000))
        zero.install_gather_hooks(model)
        run(zero, model, range(2))
        before = [p.detach().clone() for p in users]
        zero.close()
        assert all(torch.equal(a, b) for a, b in zip(before, users, strict=True))
    assert optimizer.param_groups[0]["params"] == users
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in users)
    assert not any(m._forward_pre_hooks for m in model.modules())
    model(torch.ones(2, 64, dtype=torch.bfloat16)).sum().backward()
    assert users[0].grad is not None
    assert users[0].grad.dtype == torch.bfloat16
    optimizer.step()  # plain torch again


def test_close_gives_everything_back(ranks: Callable[..., list[Any]]) -> None:
    ranks(2, close_and_go_on)
