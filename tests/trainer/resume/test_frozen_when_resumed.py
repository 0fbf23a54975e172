"""Parameters that are frozen when a run resumes, and unfrozen by a hook later: their state, against stock Lightning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_megatron import MegatronStrategy
from lightning_megatron.data import MegatronSampler, ResumableDataLoader
from lightning_megatron.testing.trainer import kind_in_tests, quiet_trainer

pytestmark = [
    pytest.mark.skipif(kind_in_tests().type != "cpu", reason="compares with Lightning's strategy for a CPU"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory", "ignore:You're resuming"),
]


class Unfrozen(LightningModule):
    """The first layer is frozen until a hook of the second epoch; a run that resumes within it sees the third one's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 1)
        self.first.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch >= 1:
            self.first.requires_grad_()

    def training_step(self, batch: Tensor) -> Tensor:
        return self.second(self.first(batch)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def resumed(
    folder: Path, strategy: Callable[[], Any], batch_size: int = 4, replica: slice = slice(None), **options: Any
) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and counts of steps after a run of four epochs that resumes in the second; a replica reads its part."""
    rows = torch.randn(16, 3, generator=torch.Generator().manual_seed(2))[replica]
    module = Unfrozen()
    trainer: Trainer
    for path in (None, folder / "step=6.ckpt"):
        module = Unfrozen()
        saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
        chosen = {"max_epochs": 4, "enable_checkpointing": True, "callbacks": [saver], "use_distributed_sampler": False}
        trainer = quiet_trainer(strategy(), **chosen, **options)
        # Stock Lightning, too, reads the rest of the epoch then.
        batches = MegatronSampler(len(rows), batch_size=batch_size)
        loader: Any = ResumableDataLoader(list(rows), batch_sampler=batches)  # type: ignore[arg-type]
        trainer.fit(module, loader, ckpt_path=path)
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    if replica.step:
        return weights, []
    state = trainer.optimizers[0].state
    return weights, [float(state[p]["step"]) for p in module.parameters()]


@pytest.mark.parametrize("directory", [True, False], ids=["directory", "file"])
def test_a_layer_that_a_hook_unfreezes_after_a_resume_goes_on_with_its_state(tmp_path: Path, directory: bool) -> None:
    weights, steps = resumed(tmp_path / "ours", lambda: MegatronStrategy(save_distributed_checkpoint=directory))
    right, counted = resumed(tmp_path / "stock", lambda: "auto")
    assert steps == counted == [10.0, 10.0, 16.0, 16.0]
    torch.testing.assert_close(weights, right, rtol=1e-6, atol=1e-7)


def test_so_it_does_with_accumulated_batches(tmp_path: Path) -> None:
    options = {"batch_size": 2, "accumulate_grad_batches": 2}
    weights, steps = resumed(tmp_path / "ours", MegatronStrategy, **options)
    right, counted = resumed(tmp_path / "stock", lambda: "auto", **options)
    assert steps == counted
    torch.testing.assert_close(weights, right, rtol=1e-6, atol=1e-7)


def on_a_replica(folder: Path, sharded: bool) -> dict[str, Tensor]:
    own = slice(dist.get_rank(), None, 2)
    return resumed(folder, lambda: MegatronStrategy(distributed_optimizer=sharded), 2, own)[0]


@pytest.mark.parametrize("sharded", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["sharded", "whole"])
def test_so_it_does_on_two_replicas(ranks: Any, tmp_path: Path, sharded: bool) -> None:
    """Held against stock Lightning in one process: DDP never averages what is frozen when it wraps a module."""
    right, _ = resumed(tmp_path / "stock", lambda: "auto")
    for weights in ranks(2, on_a_replica, tmp_path / "ours", sharded):
        torch.testing.assert_close(weights, right, rtol=1e-5, atol=1e-6)
