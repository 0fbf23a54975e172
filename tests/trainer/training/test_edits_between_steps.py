"""Weights, gradients and ``requires_grad`` changed by hand while fit runs: as in stock Lightning, or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import LlamaModule, MegatronStrategy
from lightning_megatron.testing.trainer import quiet_trainer

Ranks = Callable[..., list[Any]]
BATCH, BATCHES = 4, 6
Weights = dict[str, Tensor]


class Net(LightningModule):
    """Three layers of which the last is never called."""

    sides: int = 0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.unused = nn.Linear(4, 6), nn.Linear(6, 2), nn.Linear(2, 2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.head(torch.tanh(self.body(batch))) - 1).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.1)


class ReplacesGradients(Net):
    def on_after_backward(self) -> None:
        for p in self.parameters():
            if p.grad is not None:
                p.grad = p.grad.tanh() * 2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class ReplacesLate(ReplacesGradients):
    def on_after_backward(self) -> None: ...

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_after_backward()


class DropsGradients(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step % 2:
            self.body.bias.grad = None
            self.head.weight.grad = None


class DropsEarly(Net):
    def on_after_backward(self) -> None:
        if self.global_step % 2:
            self.head.weight.grad = None


class AddsGradients(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.unused.weight.grad = torch.ones_like(self.unused.weight)


class NewData(Net):
    def on_train_batch_end(self, *_: Any) -> None:
        self.head.weight.data = self.head.weight.detach().clone().clamp(-0.1, 0.1)


class Clips(Net):
    """As in Wasserstein GANs."""

    def on_train_batch_end(self, *_: Any) -> None:
        for p in self.parameters() if self.global_step == 10 else ():
            p.data.clamp_(-0.1, 0.1)  # undone by the next step, if that does not see it


class ClipsInStep(Net):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        with torch.no_grad():
            for p in self.parameters() if self.global_step == 10 else ():
                p.clamp_(-0.1, 0.1)


class Loads(Net):
    def on_train_epoch_start(self) -> None:
        self.load_state_dict({name: torch.full_like(value, 0.25) for name, value in self.state_dict().items()})


class LoadsOnce(Net):
    def on_fit_start(self) -> None:
        for p in self.parameters():
            p.data.copy_(torch.linspace(-0.5, 0.5, p.numel()).view_as(p))


class Thaws(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.body.requires_grad_(True)


class Freezes(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.head.requires_grad_(batch_idx % 3 != 1)


class AddsGroup(Thaws):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.head.parameters(), lr=0.05)

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        if self.current_epoch == 1:
            self.trainer.optimizers[0].add_param_group({"params": list(self.body.parameters()), "lr": 0.02})


class ReachesLater(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if self.global_step < 3 else loss + self.unused(batch[:, :2]).square().mean()


class StepsEverySecond(Net):
    """The closure without a step; Lightning clears its gradients at the next batch."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:  # type: ignore[override]
        if batch_idx % 3 == 2:
            optimizer.step(closure=closure)
        else:
            assert closure is not None
            closure()


class Accumulates(StepsEverySecond):
    """The same, and gradients add up."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 3 == 0:
            optimizer.zero_grad()


class NeverClears(Net):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None: ...


class NeedsClosure(torch.optim.AdamW):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(lambda: closure() * 1)


class WithClosure(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return NeedsClosure(self.parameters(), lr=0.05)


ANYWHERE = [
    Net, DropsGradients, DropsEarly, NewData, Clips, ClipsInStep, Loads, LoadsOnce, Thaws, Freezes, AddsGroup,
    ReachesLater, StepsEverySecond, Accumulates, NeverClears, WithClosure,
]  # fmt: skip
WHERE_WHOLE = [ReplacesGradients, ReplacesLate, AddsGradients]


def train(kind: type[Net], strategy: Any, replicas: int = 1, **options: Any) -> Weights:
    rows = torch.randn(BATCH * BATCHES, 4, generator=torch.Generator().manual_seed(1))
    mine = rows[dist.get_rank() if replicas > 1 else 0 :: replicas]
    module = kind()
    trainer = quiet_trainer(strategy, max_epochs=2, use_distributed_sampler=False, **options)
    trainer.fit(module, DataLoader(mine, batch_size=BATCH // replicas))  # type: ignore[arg-type]
    return {name: p.detach().float().cpu().clone() for name, p in module.named_parameters()}


@cache
def stock(kind: type[Net]) -> Weights:
    return train(kind, SingleDeviceStrategy("cpu"))


def assert_close(ours: Weights, theirs: Weights, kind: type[Net], rtol: float = 1e-5) -> None:
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol, msg=lambda text: f"{kind.__name__}: {text}")


@pytest.mark.parametrize("kind", ANYWHERE + WHERE_WHOLE)
def test_on_one_rank(kind: type[Net]) -> None:
    assert_close(train(kind, MegatronStrategy()), stock(kind), kind)


@pytest.mark.parametrize("kind", sorted({*ANYWHERE, *WHERE_WHOLE} - {Accumulates, NeverClears}, key=str))
def test_with_micro_batches(kind: type[Net]) -> None:
    assert_close(train(kind, MegatronStrategy(micro_batch_size=2)), stock(kind), kind, rtol=1e-4)


@pytest.mark.parametrize("kind", [*ANYWHERE, ReplacesGradients, ReplacesLate])
def test_in_bf16_mixed_main_values_follow(kind: type[Net]) -> None:
    before, theirs = dict(kind().named_parameters()), stock(kind)
    for name, value in train(kind, MegatronStrategy(), precision="bf16-mixed").items():
        moved = float((theirs[name] - before[name]).abs().max())
        torch.testing.assert_close(value, theirs[name], rtol=0.02, atol=0.02 + 0.1 * moved, msg=lambda t: f"{kind}:{t}")


def on_ranks(kinds: list[type[Net]], options: dict[str, Any]) -> list[Weights]:
    return [train(kind, MegatronStrategy(**options), 2) for kind in kinds]


PLAIN = {"distributed_optimizer": False, "overlap_grad_reduce": False}


@pytest.mark.parametrize("options", [{}, pytest.param(PLAIN, marks=pytest.mark.slow)], ids=str)
def test_on_two_ranks(ranks: Ranks, options: dict[str, Any]) -> None:
    kinds = ANYWHERE + WHERE_WHOLE
    kinds.remove(WithClosure)
    for found in ranks(2, on_ranks, kinds, options):
        for kind, weights in zip(kinds, found, strict=True):
            assert_close(weights, stock(kind), kind, rtol=1e-4)


class ReplacesInTheLoop(Net):
    """Replaces gradients of a loop by hand before they are averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.head.bias.grad = torch.ones_like(self.head.bias)
        optimizer.step()


def refused_on_ranks() -> str:
    with pytest.raises(RuntimeError, match="replaced") as error:
        train(ReplacesInTheLoop, MegatronStrategy(), 2)
    return str(error.value)


def test_gradients_replaced_before_they_are_averaged_are_refused(ranks: Ranks) -> None:
    for text in ranks(2, refused_on_ranks):
        assert "the gradient of 'head.bias' was replaced" in text
        assert "on_before_optimizer_step" in text


class Widens(Net):
    def on_train_batch_end(self, *_: Any) -> None:
        self.unused.to(torch.float64)


def test_another_dtype_in_mid_run_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"'unused\.bias' is now torch\.float64 \(2,\) on \w+(:0)?, but"):
        train(Widens, MegatronStrategy())


@pytest.mark.parametrize("kind", [Accumulates, NeverClears])
def test_gradients_that_are_to_outlive_micro_batches_are_refused(kind: type[Net]) -> None:
    with pytest.raises(MisconfigurationException, match=r"optimizer_zero_grad is overridden.*accumulate_grad_batches"):
        train(kind, MegatronStrategy(micro_batch_size=2))


class NeverRuns(Net):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None: ...


class Forgets(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step()


class WithForgetful(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Forgets(self.parameters())


@pytest.mark.parametrize("kind", [NeverRuns, WithForgetful])
def test_a_closure_that_nobody_runs_is_an_error_as_in_stock(kind: type[Net]) -> None:
    for strategy in (MegatronStrategy(), SingleDeviceStrategy("cpu")):
        with pytest.raises(MisconfigurationException, match="closure"):
            train(kind, strategy)


class Raises(Net):
    class Optimizer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise ValueError("in the middle")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.Optimizer(self.parameters(), lr=0.1)


def test_a_step_that_raises_leaves_the_users_parameters_in_the_groups() -> None:
    module = Raises()
    trainer = quiet_trainer(MegatronStrategy(), max_epochs=1)
    with pytest.raises(ValueError, match="in the middle"):
        trainer.fit(module, DataLoader(torch.ones(4, 4), batch_size=4))  # type: ignore[arg-type]
    held = trainer.optimizers[0].param_groups[0]["params"]
    assert [id(p) for p in held] == [id(p) for p in module.parameters()]


def main_values() -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "num_query_groups": 1, "vocab_size": 32}
    module = LlamaModule("llama-tiny", lr=0.05, **sizes)
    trainer = quiet_trainer(MegatronStrategy(), max_epochs=1, precision="bf16-mixed", use_distributed_sampler=False)
    tokens = torch.arange(9) + torch.arange(8)[:, None]
    data = [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]
    trainer.fit(module, DataLoader(data, batch_size=4))  # type: ignore[arg-type]
    shards = trainer.strategy.sharded_optimizers[0].param_shards()  # type: ignore[attr-defined]
    own = {f"{shard.name}[{shard.start}:{shard.end}]": shard.main.cpu().clone() for shard in shards}
    rounded = {name: value.cpu() for name, value in module.state_dict().items()}
    return trainer.strategy.main_state_dict(), own, rounded  # type: ignore[attr-defined]


def test_main_values_are_there_after_bf16_mixed(ranks: Ranks) -> None:
    for whole, own, rounded in ranks(2, main_values):
        assert whole.keys() == rounded.keys()
        assert {value.dtype for value in whole.values()} == {torch.float32}
        assert all(torch.equal(whole[name].bfloat16(), value) for name, value in rounded.items())
        assert any(not torch.equal(whole[name], value.float()) for name, value in rounded.items())
        for key, values in own.items():
            name, _, span = key.partition("[")
            start, end = (int(number) for number in span[:-1].split(":"))
            assert torch.equal(whole[name].flatten()[start:end], values)
