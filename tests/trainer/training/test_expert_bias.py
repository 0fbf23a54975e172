"""Biases of experts: they follow the load of the steps that train their router, against counts written down apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fp16 import a_device_that_trains_fp16
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import GPTModule, MegatronPrecision, MegatronStrategy
from lightning_megatron.moe.router import Router
from lightning_megatron.optim.loss_scale import DynamicLossScale
from lightning_megatron.testing.trainer import quiet_trainer

Ranks = Callable[..., list[Any]]
RATE, EXPERTS, STEPS, BATCH, LENGTH = 0.125, 4, 6, 4, 8
SIZES: dict[str, Any] = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 16}
SIZES |= {"vocab_size": 64, "max_position_embeddings": LENGTH, "vocab_multiple": 4, "init_std": 0.2}
SIZES |= {"norm": "rmsnorm", "activation": "swiglu", "position_embedding": "rope", "add_bias_linear": False}
SIZES |= {"tie_embeddings": False, "num_experts": EXPERTS, "moe_router_topk": 1, "moe_router_score": "sigmoid"}
SIZES |= {"moe_expert_bias_update_rate": RATE, "moe_aux_loss_coeff": 0.0}


def data(rows: int = STEPS * BATCH) -> list[dict[str, Tensor]]:
    tokens = torch.randint(64, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    return [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]


def router_of(module: LightningModule) -> Router:
    return next(part for part in module.modules() if isinstance(part, Router))


def moved(counts: Tensor) -> Tensor:
    """Change of the bias in a step with these loads of experts, by the formula of arXiv 2408.15664."""
    return RATE * (counts.float().mean() - counts.float()).sign()


class Watched(GPTModule):
    """Writes down the choices of each forward in training, and the bias behind each batch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(SIZES | options, lr=1e-2)
        self.forwards: list[Tensor] = []
        self.biases: list[list[float]] = []

    def configure_model(self) -> None:
        built = self.model is not None
        super().configure_model()
        if not built:
            router_of(self).register_forward_hook(self.write_down)
            self.freeze_parts()

    def write_down(self, router: Router, _inputs: Any, routing: Any) -> None:
        if router.training and torch.is_grad_enabled():
            self.forwards.append(torch.bincount(routing.experts.flatten().cpu(), minlength=EXPERTS))

    def freeze_parts(self) -> None:
        pass

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.biases.append(router_of(self).expert_bias.tolist())


def fit(module: Watched, micro_batch_size: int | None = None, **options: Any) -> Trainer:
    seed_everything(5, verbose=False)
    strategy = options.pop("strategy", None) or MegatronStrategy(micro_batch_size=micro_batch_size)
    trainer = quiet_trainer(strategy, max_epochs=1, **options)
    trainer.fit(module, DataLoader(data(), batch_size=BATCH))  # type: ignore[arg-type]
    return trainer


def followed(steps: list[list[Tensor]]) -> list[list[float]]:
    """Biases behind each step of given forwards; a step without any is one that must not count."""
    bias, found = torch.zeros(EXPERTS), []
    for forwards in steps:
        if forwards:
            bias = bias + moved(torch.stack(forwards).sum(0))
        found.append(bias.tolist())
    return found


# Frozen routers


class HeadAlone(Watched):
    def freeze_parts(self) -> None:
        for name, param in self.named_parameters():
            param.requires_grad_(name == "model.head.weight")


class RoutersFrozen(Watched):
    def freeze_parts(self) -> None:
        for name, param in self.named_parameters():
            param.requires_grad_("router" not in name)


class RoutersInNoOptimizer(Watched):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for name, p in self.named_parameters() if "router" not in name], lr=1e-2)


@pytest.mark.parametrize("kind", [HeadAlone, RoutersFrozen, RoutersInNoOptimizer])
@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_the_bias_of_a_router_that_nothing_trains_stays(kind: type[Watched], micro_batch_size: int | None) -> None:
    fit(module := kind(), micro_batch_size, accumulate_grad_batches=1 if micro_batch_size else 2)
    assert module.forwards
    assert not router_of(module).expert_bias.any()


def frozen_on_ranks(kind: type[Watched], layout: dict[str, Any]) -> bool:
    fit(module := kind(num_layers=2), strategy=MegatronStrategy(micro_batch_size=1, **layout))
    return any(bool(part.expert_bias.any()) for part in module.modules() if isinstance(part, Router))


@pytest.mark.parametrize("layout", [{"pp": 2, "recompute": "full"}, {"ep": 2}], ids=str)
def test_it_stays_on_every_layout(ranks: Ranks, layout: dict[str, Any]) -> None:
    assert ranks(2, frozen_on_ranks, RoutersFrozen, layout) == [False, False]


class ThawedInTheMiddle(RoutersFrozen):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == STEPS // 2:
            router_of(self).weight.requires_grad_(True)


def test_the_bias_moves_from_the_step_on_in_which_the_router_is_trained() -> None:
    fit(module := ThawedInTheMiddle())
    half = STEPS // 2
    assert module.biases == followed([[]] * half + [[each] for each in module.forwards[half:]])


# Several optimizers


class TwoOptimizers(Watched):
    """The first optimizer holds the head and the second the rest; each steps from a forward of its own."""

    toggles = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        head = [p for name, p in self.named_parameters() if "head" in name]
        rest = [p for name, p in self.named_parameters() if "head" not in name]
        return torch.optim.SGD(head, lr=1e-2), torch.optim.SGD(rest, lr=1e-2)

    def one(self, number: int, batch: Any) -> None:
        optimizer = self.optimizers()[number]  # type: ignore[index]
        if self.toggles:
            self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        if self.toggles:
            self.untoggle_optimizer(optimizer)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.one(batch_idx % 2, batch)


class Toggling(TwoOptimizers):
    toggles = True


class BothFromOneForward(TwoOptimizers):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("kind", [TwoOptimizers, Toggling, BothFromOneForward])
def test_the_bias_moves_with_the_optimizer_that_holds_the_router(kind: type[TwoOptimizers]) -> None:
    fit(module := kind())
    seen, expected = module.forwards, []
    for number in range(STEPS):
        if kind is BothFromOneForward:
            expected.append([seen[number]])
        elif number % 2 == 0:
            expected.append([])
        else:  # without toggling the forward for the head has given gradients to the router, too
            expected.append(seen[number - 1 : number + 1] if kind is TwoOptimizers else [seen[number]])
    assert module.biases == followed(expected)


# Steps that are skipped


class Gate:
    """Refuses some of the steps."""

    def __init__(self, refused: set[int]) -> None:
        self.refused, self.asked = refused, iter(range(STEPS))

    def admits(self, overflow: bool) -> bool:
        return next(self.asked) not in self.refused


@pytest.mark.parametrize(("micro_batch_size", "accumulated"), [(None, 1), (2, 1), (None, 2)])
def test_the_load_of_a_refused_step_is_forgotten(micro_batch_size: int | None, accumulated: int) -> None:
    strategy, refused = MegatronStrategy(micro_batch_size=micro_batch_size), {0, 1}
    strategy.precision_plugin.step_gate = Gate(refused)
    fit(module := Watched(), strategy=strategy, accumulate_grad_batches=accumulated)
    size = accumulated * (BATCH // micro_batch_size if micro_batch_size else 1)
    steps = [module.forwards[i : i + size] for i in range(0, len(module.forwards), size)]
    expected = followed([[] if number in refused else seen for number, seen in enumerate(steps)])
    assert module.biases[accumulated - 1 :: accumulated] == expected


class Overflowing(Watched):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx in (1, 2) else loss


def test_the_load_of_a_step_that_overflows_is_forgotten() -> None:
    with a_device_that_trains_fp16():
        plugin = MegatronPrecision("16-mixed", DynamicLossScale(scale=2.0**10))
        fit(module := Overflowing(), plugins=[plugin])
    assert module.biases == followed([[] if n in (1, 2) else [seen] for n, seen in enumerate(module.forwards)])


class WithoutLoss(Watched):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx in (1, 2) else loss


@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_the_load_of_a_batch_without_a_loss_is_forgotten(micro_batch_size: int | None) -> None:
    fit(module := WithoutLoss(), micro_batch_size)
    size = BATCH // micro_batch_size if micro_batch_size else 1
    batches: Iterator[list[Tensor]] = (module.forwards[i : i + size] for i in range(0, STEPS * size, size))
    assert module.biases == followed([[] if n in (1, 2) else seen for n, seen in enumerate(batches)])
