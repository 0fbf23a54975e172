"""The kernel of Adam and AdamW under mixed precision where the user has chosen none: fused, with torch's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.optim.core.config import DistributedOptimizerConfig
from lightning_megatron.optim.zero import ShardedOptimizer
from lightning_megatron.params import named_specs


class Operators(TorchDispatchMode):
    """Names of the operators that have run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def net(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2)).to(dtype)


def train(optimizer: Optimizer, model: nn.Module, zero: ShardedOptimizer | None, steps: int = 5) -> set[str]:
    found = Operators()
    for seed in range(steps):
        optimizer.zero_grad() if zero is None else zero.zero_grads()
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(seed))
        model(x.to(next(model.parameters()).dtype)).float().square().sum().backward()
        with found:
            optimizer.step()
    return found.names


def is_fused(names: set[str]) -> bool:
    return any("_fused_adam" in name for name in names)


def sharded(model: nn.Module, optimizer: Optimizer, **options: Any) -> ShardedOptimizer:
    return ShardedOptimizer(optimizer, named_specs(model), ParallelMesh.single(), DistributedOptimizerConfig(**options))


@pytest.mark.parametrize("kind", [Adam, AdamW])
@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "weight_decay": 0.1}])
def test_an_open_choice_is_fused_with_torchs_numbers(kind: type[Optimizer], options: dict[str, Any]) -> None:
    model, plain = net(), net()
    optimizer = kind(model.parameters(), lr=0.01, **options)
    plain_optimizer = kind(plain.parameters(), lr=0.01, fused=False, **options)
    zero, plain_zero = sharded(model, optimizer), sharded(plain, plain_optimizer)
    assert is_fused(train(optimizer, model, zero))
    assert not is_fused(train(plain_optimizer, plain, plain_zero))
    assert optimizer.param_groups[0]["fused"] is None
    for ours, torchs in zip(zero.main_params, plain_zero.main_params, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", [{"fused": False}, {"foreach": True}, {"foreach": False}])
def test_a_choice_of_the_user_stays(options: dict[str, Any]) -> None:
    model = net()
    optimizer = AdamW(model.parameters(), lr=0.01, **options)
    assert not is_fused(train(optimizer, model, sharded(model, optimizer)))


def test_other_optimizers_and_parameters_without_copies_stay_as_they_are() -> None:
    class Own(AdamW):
        pass

    for kind in (Own, SGD):
        model = net()
        optimizer = kind(model.parameters(), lr=0.01)
        assert not is_fused(train(optimizer, model, sharded(model, optimizer)))
    for dtype in (torch.bfloat16, torch.float32):
        model = net(dtype)
        optimizer = AdamW(model.parameters(), lr=0.01)
        assert not is_fused(train(optimizer, model, sharded(model, optimizer, main_dtype=None)))


def test_a_step_that_fails_leaves_the_choice_open() -> None:
    class FaultError(RuntimeError):
        pass

    def closure() -> float:
        raise FaultError

    model = net()
    optimizer = AdamW(model.parameters(), lr=0.01)
    zero = sharded(model, optimizer)
    with pytest.raises(FaultError):
        optimizer.step(closure)
    zero.recover()
    assert optimizer.param_groups[0]["fused"] is None
    assert optimizer.param_groups[0]["params"][0] is next(model.parameters())
