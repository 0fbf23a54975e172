"""``Trainer.save_checkpoint`` after an evaluation behind a fit: it has the optimizer's state, as in stock Lightning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from lightning_megatron.testing.trainer import quiet_trainer

Ranks = Callable[..., list[Any]]
ROWS, BATCH = 12, 2
CALLS = ("validate", "test", "predict")


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).float().square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None: ...

    def test_step(self, batch: Tensor, batch_idx: int) -> None: ...

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def rows() -> DataLoader[Any]:
    """The rows of this replica."""
    every = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(1))
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return DataLoader(every[rank::size], batch_size=BATCH)  # type: ignore[arg-type]


def trained(
    epochs: int, options: dict[str, Any], call: str | None, path: Path, start: Path | None
) -> dict[str, Tensor]:
    """Weights after a fit, then an evaluation, then a save."""
    module = Net()
    trainer = quiet_trainer(MegatronStrategy(), max_epochs=epochs, use_distributed_sampler=False, **options)
    trainer.fit(module, rows(), ckpt_path=start)
    if call is not None:
        getattr(trainer, call)(module, rows())
    trainer.save_checkpoint(path)
    return {name: value.detach().float().clone() for name, value in module.state_dict().items()}


def goes_on(folder: Path, call: str, options: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    whole = trained(2, options, None, folder / "whole.ckpt", None)
    trained(1, options, call, folder / "half.ckpt", None)
    return whole, trained(2, options, None, folder / "rest.ckpt", folder / "half.ckpt")


@pytest.mark.parametrize("call", CALLS)
def test_a_run_goes_on_from_it_bit_for_bit(tmp_path: Path, call: str) -> None:
    whole, rest = goes_on(tmp_path, call, {})
    torch.testing.assert_close(rest, whole, rtol=0, atol=0)


def test_so_it_does_with_state_in_shards_and_in_bf16(ranks: Ranks, tmp_path: Path) -> None:
    for whole, rest in ranks(2, goes_on, tmp_path, "predict", {"precision": "bf16-mixed"}):
        torch.testing.assert_close(rest, whole, rtol=0, atol=0)


def test_weights_that_a_test_has_loaded_are_those_of_the_save_and_of_a_further_fit(tmp_path: Path) -> None:
    before = Net().state_dict()
    for strategy in ("auto", MegatronStrategy()):
        first = quiet_trainer(strategy, max_epochs=1)
        first.strategy.connect(Net())
        module = Net()
        trainer = quiet_trainer("auto" if strategy == "auto" else MegatronStrategy(), max_epochs=1)
        path = tmp_path / f"{type(trainer.strategy).__name__}.ckpt"
        first.save_checkpoint(path)
        trainer.fit(module, rows())
        trainer.test(module, rows(), ckpt_path=path)
        torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, rows())
        found = {name: value.clone() for name, value in module.state_dict().items()}
        assert not torch.equal(found["net.0.weight"], before["net.0.weight"])
        if strategy == "auto":
            stock = found
    torch.testing.assert_close(found, stock, rtol=1e-6, atol=1e-7)
