"""Modules, optimizers and callbacks that hash and compare by a state which training changes, on two replicas."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from lightning_megatron.testing.trainer import kind_in_tests, quiet_trainer

Ranks = Callable[..., list[Any]]
pytestmark = pytest.mark.skipif(kind_in_tests().type != "cpu", reason="stock's numbers are those of a CPU")


class ByState:
    """Equal are objects of a class that have the same state."""

    def key(self) -> Any:
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and isinstance(other, ByState) and self.key() == other.key()

    def __hash__(self) -> int:
        return hash(self.key())


class Layer(ByState, nn.Linear):
    """Counts its calls."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.calls = 0

    def key(self) -> Any:
        return self.in_features, self.calls, self.weight.detach().sum().item()

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(input)


class Momentum(ByState, torch.optim.SGD):
    def key(self) -> Any:
        return tuple(group["lr"] for group in self.param_groups)


class Counts(ByState, Callback):
    """Two of them are equal all the time."""

    def __init__(self) -> None:
        self.batches = 0

    def key(self) -> Any:
        return self.batches

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        self.batches += 1


class Net(ByState, LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.again, self.head = Layer(4, 6), Layer(6, 6), Layer(6, 2)
        self.seen = 0

    def key(self) -> Any:
        return self.seen, self.head.weight.detach().sum().item()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += 1
        return (self.head(self.again(self.body(batch).tanh()).tanh()) - 1).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = Momentum(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class ByHand(Net):
    """Two optimizers that are equal all the time."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        parts = [self.body, self.again], [self.head]
        return [Momentum([p for layer in part for p in layer.parameters()], lr=0.1, momentum=0.9) for part in parts]


def train(kind: type[Net], strategy: Any, watched: bool) -> tuple[dict[str, Tensor], list[int]]:
    rows = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))[dist.get_rank() :: 2]
    module, counts = kind(), [Counts(), Counts()] if watched else []
    trainer = quiet_trainer(strategy, max_epochs=2, use_distributed_sampler=False, callbacks=list(counts))
    trainer.fit(module, DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
    calls = [layer.calls for layer in (module.body, module.again, module.head)]
    weights = {name: param.detach().clone() for name, param in module.named_parameters()}
    return weights, [*(each.batches for each in counts), *calls, module.seen]


def both() -> list[tuple[str, Any, Any]]:
    found = []
    for kind, watched in ((Net, False), (Net, True), (ByHand, True)):
        ours, stock = MegatronStrategy(), DDPStrategy(process_group_backend="gloo")
        found.append((kind.__name__, train(kind, ours, watched), train(kind, stock, watched)))
    return found


def test_they_train_as_under_ddp(ranks: Ranks) -> None:
    for found in ranks(2, both):
        for kind, ours, stock in found:
            torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-6, msg=partial("{}: {}".format, kind))
