"""Sparse gradients of ``nn.Embedding(sparse=True)``: trained as under stock Lightning, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam
from torch.utils.data import DataLoader

from lightning_megatron import ConfigError, MegatronStrategy
from lightning_megatron.testing.trainer import kind_in_tests, quiet_trainer

Ranks = Callable[..., list[Any]]
pytestmark = pytest.mark.skipif(kind_in_tests().type != "cpu", reason="stock's numbers are those of a CPU")
WORDS = 10


class Words(LightningModule):
    """A table of words and one of bags, of which a batch reads some rows, twice in a batch too."""

    def __init__(self, make: Callable[..., Optimizer]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.bags = nn.Embedding(WORDS, 4, sparse=True), nn.EmbeddingBag(WORDS, 4, sparse=True)
        self.head, self.make = nn.Linear(4, 1), make

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.head(self.words(batch).mean(1) * self.bags(batch)) - 1).square().mean()

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


class Manual(Words):
    """Keeps gradients in ``param.grad``, here of two backwards."""

    def __init__(self, make: Callable[..., Optimizer]) -> None:
        super().__init__(make)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        for half in batch.chunk(2):
            self.manual_backward(super().training_step(half, batch_idx))
        optimizer.step()


class Assigns(Words):
    """Replaces the gradients by sparse ones."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.words.weight.grad = torch.eye(WORDS, 4).to_sparse()


class SteppedByHand(Words):
    """The table of words is in no optimizer that Lightning knows."""

    def configure_optimizers(self) -> Any:
        self.own = self.make(self.words.parameters())
        return self.make([*self.bags.parameters(), *self.head.parameters()])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.own.step()
        self.own.zero_grad()


class Beside(Manual):
    """``SparseAdam`` for the tables, another optimizer for the rest, as torch's documentation has it."""

    def configure_optimizers(self) -> Any:
        return [SparseAdam([self.words.weight, self.bags.weight], lr=0.1), self.make(self.head.parameters())]


MAKE: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, lr=0.1),
    "momentum": partial(SGD, lr=0.1, momentum=0.9),
    "adagrad": partial(Adagrad, lr=0.1),
}
RUNS: list[tuple[type[Words], str, dict[str, Any]]] = [
    *((Words, name, {}) for name in MAKE),
    (Words, "momentum", {"accumulate_grad_batches": 2}),
    *((kind, "sgd", {}) for kind in (Manual, Assigns, SteppedByHand)),
]


def weights(strategy: Any, kind: type[Words], make: str, options: dict[str, Any]) -> dict[str, Tensor]:
    rank, replicas = (dist.get_rank(), 2) if dist.is_initialized() else (0, 1)
    rows = torch.randint(WORDS, (24, 3), generator=torch.Generator().manual_seed(1))[rank::replicas]
    module = kind(MAKE[make])
    trainer = quiet_trainer(strategy, max_epochs=1, use_distributed_sampler=False, **options)
    trainer.fit(module, DataLoader(rows, batch_size=4 // replicas))  # type: ignore[arg-type]
    return {name: param.detach().clone() for name, param in module.named_parameters()}


def on_two_replicas() -> list[tuple[str, Any, Any]]:
    found = []
    for kind, make, options in RUNS[-4:]:
        run = make, options
        stock, ours = DDPStrategy(process_group_backend="gloo", find_unused_parameters=True), MegatronStrategy()
        found.append((f"{kind.__name__} {run}", weights(ours, kind, *run), weights(stock, kind, *run)))
    return found


@pytest.mark.parametrize(("kind", "make", "options"), RUNS)
def test_one_process_trains_as_stock_lightning(kind: type[Words], make: str, options: dict[str, Any]) -> None:
    ours, stock = weights(MegatronStrategy(), kind, make, options), weights("auto", kind, make, options)
    torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-6)


def test_two_replicas_train_as_under_ddp(ranks: Ranks) -> None:
    for run, ours, stock in ranks(2, on_two_replicas)[0]:
        torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-6, msg=partial("{}: {}".format, run))


def test_sparse_adam_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"SparseAdam.*sparse=True become dense.*Adam takes them"):
        weights(MegatronStrategy(), Beside, "sgd", {})
