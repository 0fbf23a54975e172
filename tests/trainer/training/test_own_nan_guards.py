"""A guard of the user's own, which clears NaN gradients before a step: as in stock Lightning where checks are off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from lightning_megatron.optim.finite_check import NonFiniteError
from lightning_megatron.testing.trainer import kind_in_tests, quiet_trainer

Ranks = Callable[..., list[Any]]
pytestmark = pytest.mark.skipif(kind_in_tests().type != "cpu", reason="stock's numbers are those of a CPU")
STEPS, BAD = 6, 2


class Guarded(LightningModule):
    """The last replica's loss is NaN in one batch; the hook clears what is not finite."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 1)
        self.cleared = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        is_bad = batch_idx == BAD and self.global_rank == self.trainer.world_size - 1
        return self.head(self.body(batch).tanh()).square().mean() * (float("nan") if is_bad else 1)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for param in self.parameters():
            if param.grad is not None and not param.grad.isfinite().all():
                param.grad.zero_()
                self.cleared += 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def fit(strategy: Any, **options: Any) -> tuple[Guarded, Any]:
    module = Guarded()
    rank, replicas = (dist.get_rank(), 2) if dist.is_initialized() else (0, 1)
    rows = torch.randn(4 * STEPS, 4, generator=torch.Generator().manual_seed(1))[rank::replicas]
    trainer = quiet_trainer(strategy, max_epochs=1, use_distributed_sampler=False, **options)
    error = None
    try:
        trainer.fit(module, DataLoader(rows, batch_size=4 // replicas))  # type: ignore[arg-type]
    except NonFiniteError as caught:
        error = caught
    return module, (trainer.global_step, str(error))


def weights(strategy: Any, **options: Any) -> tuple[dict[str, Tensor], int]:
    module, (_, error) = fit(strategy, **options)
    assert error == "None", error
    return {name: param.detach().clone() for name, param in module.named_parameters()}, module.cleared


def against_ddp(options: list[dict[str, Any]]) -> list[Any]:
    return [
        (
            weights(MegatronStrategy(check_for_nan_in_loss_and_grad=False), **each),
            weights(DDPStrategy(process_group_backend="gloo"), **each),
        )
        for each in options
    ]


WAYS: list[dict[str, Any]] = [{}, {"accumulate_grad_batches": 2}]


@pytest.mark.parametrize("options", WAYS, ids=["plain", "accumulated"])
def test_a_guard_works_as_in_stock_lightning_without_our_check(options: dict[str, Any]) -> None:
    ours = weights(MegatronStrategy(check_for_nan_in_loss_and_grad=False), **options)
    torch.testing.assert_close(ours, weights("auto", **options), rtol=1e-6, atol=1e-7)
    assert ours[1] == 4


def test_it_does_on_two_replicas(ranks: Ranks) -> None:
    for found in ranks(2, against_ddp, WAYS):
        for ours, stock in found:
            torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-6)
            assert ours[1] == 4


def with_our_check() -> tuple[int, str]:
    found: tuple[int, str] = fit(MegatronStrategy())[1]
    return found


def test_our_check_comes_first_and_names_its_setting(ranks: Ranks) -> None:
    """On all ranks, before the step."""
    for steps, error in (with_our_check(), *ranks(2, with_our_check)):
        assert steps == BAD
        assert error.startswith(f"step {BAD}: the loss on rank")
        assert "check_for_nan_in_loss_and_grad=False" in error
