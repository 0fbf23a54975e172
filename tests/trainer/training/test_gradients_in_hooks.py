"""Gradients that hooks of a program read or change, on two replicas: those of stock Lightning's DDP, in its numbers."""

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
Found = tuple[dict[str, Tensor], list[list[float]]]
pytestmark = pytest.mark.skipif(kind_in_tests().type != "cpu", reason="stock's numbers are those of a CPU")
BATCH, BATCHES = 4, 6


class Net(LightningModule):
    """Notes the gradients that a hook sees, and changes them by ``edit``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 2)
        self.seen: list[list[float]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.head(torch.tanh(self.body(batch))) - 1).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def look(self) -> None:
        """Note the norm of each gradient."""
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        self.seen.append([float(grad.norm()) for grad in grads])

    def clamp(self) -> None:
        """Change gradients in place by a non-linear function."""
        for p in self.parameters():
            if p.grad is not None:
                p.grad.clamp_(-0.1, 0.1)


class AfterBackward(Net):
    def on_after_backward(self) -> None:
        self.look()
        self.clamp()


class ClipsAfterBackward(Net):
    """The norm needs all elements of the gradient."""

    def on_after_backward(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)


class ReplacesAfterBackward(Net):
    def on_after_backward(self) -> None:
        for p in self.parameters():
            if p.grad is not None:
                p.grad = p.grad / p.grad.norm()


class BeforeStep(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.look()
        for p in self.parameters():
            if p.grad is not None:
                p.grad = p.grad.tanh()


class OwnClipping(Net):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)


class OwnBackward(Net):
    """Changes gradients before :meth:`backward` returns."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        for p in self.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)


class OwnStep(Net):
    """Changes gradients between the closure and the step."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        closure()
        for p in self.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)
        optimizer.step()


class Manual(AfterBackward):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        for half in batch.split(1):
            self.manual_backward(super().training_step(half, batch_idx))
        optimizer.step()


class Toggled(Net):
    """A step of one optimizer leaves the gradients of the other's parameters, which its hook sees too."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.body, self.head)]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.look()


class ToggledSums(Toggled):
    """Steps every second batch; a hook in front of a step also sees what the other optimizer has gathered so far."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            self.toggle_optimizer(optimizer)
            self.manual_backward(Net.training_step(self, batch, batch_idx))
            if batch_idx % 2:
                optimizer.step()
                optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)


def clamp(param: Tensor) -> None:
    """A hook for a parameter."""
    assert param.grad is not None
    param.grad.clamp_(-0.03, 0.03)


class OnTensors(Net):
    """Hooks of parameters see the gradient of one rank, before any reduction, and run once a backward."""

    def on_train_start(self) -> None:
        self.body.weight.register_hook(lambda grad: grad.clamp(-0.05, 0.05))
        for p in self.parameters():
            p.register_post_accumulate_grad_hook(clamp)


class SeesSometimes(AfterBackward):
    """One replica does not use a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(4, 2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + self.extra(batch).square().mean() if self.global_rank == batch_idx % 2 else loss


class StepsByHand(Net):
    """The head is in no optimizer of :meth:`configure_optimizers`."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.own = torch.optim.SGD(self.head.parameters(), lr=0.05)
        return torch.optim.SGD(self.body.parameters(), lr=0.1, momentum=0.9)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2:
            self.own.step()
            self.own.zero_grad()


class OwnOptimizer(StepsByHand):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class NewOptimizers(Net):
    """Begins with new optimizers in mid-run, whose groups are others."""

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 2:
            groups = [{"params": self.head.parameters(), "lr": 0.2}, {"params": self.body.parameters()}]
            self.trainer.optimizers = [torch.optim.AdamW(groups, lr=0.02)]


class Clamps(Callback):
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        pl_module.look()
        pl_module.clamp()


KINDS = [
    AfterBackward, ClipsAfterBackward, ReplacesAfterBackward, BeforeStep, OwnClipping, OwnBackward, OwnStep, Manual,
    OnTensors, SeesSometimes, Toggled,
]  # fmt: skip


ELSEWHERE: list[type[Net]] = [StepsByHand, OwnOptimizer, NewOptimizers]


def train(kind: type[Net], strategy: Any, **options: Any) -> Found:
    rows = torch.randn(BATCH * BATCHES, 4, generator=torch.Generator().manual_seed(1))
    module = kind()
    trainer = quiet_trainer(strategy, max_epochs=1, use_distributed_sampler=False, **options)
    trainer.fit(module, DataLoader(rows[dist.get_rank() :: 2], batch_size=BATCH // 2))  # type: ignore[arg-type]
    return {name: p.detach().float().clone() for name, p in module.named_parameters()}, module.seen


def both(kinds: list[type[Net]], ours: dict[str, Any], **options: Any) -> list[tuple[type[Net], Found, Found]]:
    found = []
    for kind in kinds:
        stock = DDPStrategy(find_unused_parameters=True, process_group_backend="gloo")
        found.append((kind, train(kind, MegatronStrategy(**ours), **options), train(kind, stock, **options)))
    return found


def assert_equal(found: list[Any], rtol: float) -> None:
    for kind, ours, theirs in (each for rank in found for each in rank):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol / 10, msg=partial("{}: {}".format, kind.__name__))


def test_hooks_see_and_change_the_gradients_of_ddp(ranks: Ranks) -> None:
    assert_equal(ranks(2, both, KINDS, {}), 1e-5)


def test_hooks_of_callbacks_do_too(ranks: Ranks) -> None:
    assert_equal(ranks(2, both, [Net], {}, callbacks=[Clamps()]), 1e-5)


@pytest.mark.parametrize(
    ("ours", "options"),
    [
        ({}, {"accumulate_grad_batches": 2}),
        ({"micro_batch_size": 1}, {}),
        ({"distributed_optimizer": False}, {}),
        ({}, {"precision": "bf16-mixed"}),
    ],
    ids=["accumulated", "micro-batches", "whole", "bf16"],
)
def test_so_they_do_however_a_step_is_cut(ranks: Ranks, ours: dict[str, Any], options: dict[str, Any]) -> None:
    kinds: list[type[Net]] = [AfterBackward, ClipsAfterBackward, BeforeStep]
    assert_equal(ranks(2, both, kinds, ours, **options), 1e-2 if "precision" in options else 1e-5)


IN_EACH_FORM = pytest.mark.parametrize(
    ("ours", "options"),
    [({}, {}), ({}, {"precision": "bf16-mixed"}), ({"distributed_optimizer": False}, {})],
    ids=["sharded", "bf16", "whole"],
)


@IN_EACH_FORM
def test_optimizers_that_are_toggled_leave_the_gradients_of_ddp(
    ranks: Ranks, ours: dict[str, Any], options: dict[str, Any]
) -> None:
    assert_equal(ranks(2, both, [Toggled, ToggledSums], ours, **options), 1e-5)


@IN_EACH_FORM
def test_gradients_outside_of_the_optimizers_are_averaged_too(
    ranks: Ranks, ours: dict[str, Any], options: dict[str, Any]
) -> None:
    assert_equal(ranks(2, both, ELSEWHERE, ours, **options), 1e-5)


def test_they_are_averaged_once_a_step_of_accumulated_batches(ranks: Ranks) -> None:
    for ours in ({}, {"micro_batch_size": 1}):
        assert_equal(ranks(2, both, [StepsByHand], ours, accumulate_grad_batches=2), 1e-5)
