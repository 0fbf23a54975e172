"""Norms of gradients in hooks: of the whole model and of each parameter, whatever a rank holds of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import GPTModule, MegatronStrategy
from lightning_megatron.testing.trainer import quiet_trainer

Norms = list[dict[str, float]]


class Plain(LightningModule):
    """A user's module that looks at its gradients as Lightning's documentation has it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.frozen = nn.Linear(1, 1).requires_grad_(False)
        self.seen: Norms = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.frozen(self.body(x)), y)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(norms_of(self))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Looks(GPTModule):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        self.__dict__.setdefault("seen", []).append(norms_of(self))


def norms_of(module: LightningModule) -> dict[str, float]:
    """Ours through the strategy; of stock with Lightning's own function and names."""
    strategy = module.trainer.strategy
    if isinstance(strategy, MegatronStrategy):
        found = {name: float(norm) for name, norm in strategy.grad_norms().items()}
        return found | {"total": float(strategy.grad_norm())}
    return {
        name.removeprefix("grad_2.0_norm/").removeprefix("grad_2.0_norm_"): float(norm)
        for name, norm in grad_norm(module, 2).items()
    }


def plain_run(ours: bool, **options: Any) -> Norms:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    data = DataLoader([(row, row.sum().reshape(1).sin()) for row in x], batch_size=4)  # type: ignore[arg-type]
    module = Plain()
    strategy = MegatronStrategy(**options) if ours else DDPStrategy()
    quiet_trainer(strategy, max_epochs=1, accelerator="cpu", gradient_clip_val=0.1).fit(module, data)
    return module.seen


def against_ddp() -> tuple[Norms, list[Norms]]:
    return plain_run(False), [plain_run(True), plain_run(True, distributed_optimizer=False)]


def language_run(layout: dict[str, Any], batch_size: int, **shape: Any) -> Norms:
    seed_everything(3, verbose=False)
    tokens = torch.randint(48, (16, 17), generator=torch.Generator().manual_seed(2))
    rows = [{"tokens": t[:-1], "labels": t[1:]} for t in tokens]
    module = Looks("llama-tiny", lr=1e-3, vocab_size=48, hidden_size=32, num_attention_heads=4, num_layers=2, **shape)
    options: dict[str, Any] = {"max_steps": 2, "accelerator": "cpu", "gradient_clip_val": 0.1}
    trainer = quiet_trainer(MegatronStrategy(**layout), use_distributed_sampler=False, **options)
    trainer.fit(module, DataLoader(rows, batch_size=batch_size))  # type: ignore[arg-type]
    return module.seen


def several(layouts: list[dict[str, Any]], batch_size: int, **shape: Any) -> list[Norms]:
    return [language_run(layout, batch_size, **shape) for layout in layouts]


def assert_same(ours: Norms, theirs: Norms, rel: float) -> None:
    assert len(ours) == len(theirs) > 0
    for mine, its in zip(ours, theirs, strict=True):
        assert mine.keys() == its.keys()
        assert mine == pytest.approx(its, rel=rel)


def test_over_two_replicas_they_are_those_of_ddp(ranks: Callable[..., list[Any]]) -> None:
    for theirs, runs in ranks(2, against_ddp):
        for ours in runs:
            assert_same(ours, theirs, 1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_in_every_layout_they_are_those_of_the_whole_model(ranks: Callable[..., list[Any]], tied: bool) -> None:
    shape = {"tie_embeddings": tied}
    layouts: list[dict[str, Any]] = [{"tp": 2}, {"pp": 2, "micro_batch_size": 2}, {"cp": 2}]
    (whole,) = ranks(1, several, [{}], 4, **shape)
    for runs in ranks(2, several, layouts, 4, **shape):
        for ours in runs:
            assert_same(ours, whole[0], 1e-4)
