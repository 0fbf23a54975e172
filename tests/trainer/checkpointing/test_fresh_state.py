"""A checkpoint has no optimizer state of parameters without a gradient so far: a resumed run begins it at the first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateFinder
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from lightning_megatron import GPTModule, MegatronStrategy
from lightning_megatron.checkpoint import CheckpointError, open_checkpoint
from lightning_megatron.testing.trainer import quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint")
Ranks = Callable[..., list[Any]]
Values = dict[str, Tensor]
LATE, STEPS = 3, 6
ROWS = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "adamw": optim.AdamW,
    "nadam": optim.NAdam,
    "dampened": lambda params, lr: optim.SGD(params, lr, momentum=0.9, dampening=0.5),
    "adagrad": lambda params, lr: optim.Adagrad(params, lr, initial_accumulator_value=0.5),
    "adafactor": optim.Adafactor,
    "plain": optim.SGD,
}


class Late(LightningModule):
    """A layer gets gradients from step ``LATE`` on."""

    def __init__(self, optimizer: str, lr: float = 0.05) -> None:
        super().__init__()
        self.first, self.late, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.optimizer, self.lr = optimizer, lr

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.first(batch)
        if self.global_step >= LATE:
            hidden = self.late(hidden)
        return self.last(hidden).square().mean()

    def configure_optimizers(self) -> optim.Optimizer:
        return OPTIMIZERS[self.optimizer](self.parameters(), lr=self.lr)


class SavesAt(Callback):
    """Save before a step."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def fit(
    strategy: Any, optimizer: str, callbacks: Any = (), resume: Path | None = None, make: type[Late] = Late
) -> Values:
    seed_everything(5, verbose=False)
    model = make(optimizer)
    arguments: dict[str, Any] = {"limit_val_batches": 0, "use_distributed_sampler": False}
    trainer = quiet_trainer(strategy, max_steps=STEPS, callbacks=list(callbacks), **arguments)
    trainer.fit(model, DataLoader([ROWS] * STEPS, batch_size=None), ckpt_path=resume)  # type: ignore[arg-type]
    return {name: value.cpu().clone() for name, value in model.state_dict().items()}


def fit_ours(optimizer: str, *arguments: Any, one_file: bool = True, **named: Any) -> Values:
    return fit(MegatronStrategy(save_distributed_checkpoint=not one_file), optimizer, *arguments, **named)


def assert_same(found: Values, expected: Values) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("step", [0, 2, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ours_and_stock_go_on_from_checkpoints_without_it(tmp_path: Path, optimizer: str, step: int) -> None:
    stock, ours, directory = tmp_path / "stock.ckpt", tmp_path / "ours.ckpt", tmp_path / "directory.ckpt"
    straight = fit("auto", optimizer, [SavesAt(step, stock)])
    assert_same(fit_ours(optimizer, [SavesAt(step, ours)]), straight)
    assert_same(fit_ours(optimizer, [SavesAt(step, directory)], one_file=False), straight)
    for path in (stock, ours, directory):
        assert_same(fit_ours(optimizer, [SavesAt(step + 1, tmp_path / "later.ckpt")], path), straight)
    assert_same(fit("auto", optimizer, resume=ours), straight)


def test_replicas_go_on_from_them(ranks: Ranks, tmp_path: Path) -> None:
    for step in (0, 2):
        file = tmp_path / f"{step}.ckpt"
        straight = fit("auto", "adamw", [SavesAt(step, file)])
        for found in ranks(2, fit_ours, "adamw", (), file):
            torch.testing.assert_close(found, straight, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("one_file", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_a_search_has_done_to_an_optimizer_is_undone(tmp_path: Path, optimizer: str, one_file: bool) -> None:
    """It saves before the first step, and loads that into the optimizer that has made its steps."""

    def search(strategy: Any) -> Values:
        finder = LearningRateFinder(num_training_steps=8, early_stop_threshold=None, update_attr=False)
        return fit(strategy, optimizer, [finder])

    assert_same(search(MegatronStrategy(save_distributed_checkpoint=not one_file)), search("auto"))


class Apart(Late):
    """The layer has an optimizer of its own."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        early, late = self.optimizers()  # type: ignore[misc]
        uses_late = batch_idx >= LATE
        hidden = self.first(batch)
        self.manual_backward(self.last(self.late(hidden) if uses_late else hidden).square().mean())
        for each in (early, late) if uses_late else (early,):
            each.step()
            each.zero_grad()

    def configure_optimizers(self) -> Any:
        early, make = [*self.first.parameters(), *self.last.parameters()], OPTIMIZERS[self.optimizer]
        return [optim.AdamW(early), make(self.late.parameters(), lr=self.lr)]


@pytest.mark.parametrize("one_file", [True, False])
@pytest.mark.parametrize("optimizer", ["nadam", "dampened"])
def test_an_optimizer_without_steps_so_far_goes_on_beside_another(
    tmp_path: Path, optimizer: str, one_file: bool
) -> None:
    path = tmp_path / "a.ckpt"
    straight = fit("auto", optimizer, make=Apart)
    assert_same(fit_ours(optimizer, [SavesAt(2, path)], one_file=one_file, make=Apart), straight)
    assert_same(fit_ours(optimizer, resume=path, make=Apart), straight)


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("one_file", [True, False])
def test_an_optimizer_of_another_kind_is_refused(tmp_path: Path, one_file: bool, step: int) -> None:
    """It has no state at all, before and after its first step."""
    path = tmp_path / "a.ckpt"
    fit_ours("plain", [SavesAt(step, path)], one_file=one_file)
    with pytest.raises(CheckpointError, match="Missing key"):
        fit_ours("adamw", resume=path)


class LosesItsPart(Callback):
    """After a step, rank 1 has no state of its part of each layer, as if it had got no gradient."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 1:
            trainer.optimizers[0].state.clear()


def fit_halves(layout: dict[str, Any], path: Path, one_file: bool, resume: bool) -> None:
    strategy = MegatronStrategy(**layout, save_distributed_checkpoint=not one_file)
    trainer = quiet_trainer(strategy, max_steps=1 + resume, callbacks=[LosesItsPart()], limit_val_batches=0)
    sizes: dict[str, Any] = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 16}
    model, row = GPTModule("gpt-tiny", **sizes, max_position_embeddings=8), torch.arange(5)
    rows: Any = [{"tokens": row[:-1], "labels": row[1:]}] * 2
    trainer.fit(model, DataLoader(rows), ckpt_path=path if resume else None)
    if not resume:
        trainer.save_checkpoint(path)
        assert bool(trainer.optimizers[0].state) == (trainer.global_rank == 0)  # as before the save


@pytest.mark.parametrize("one_file", [True, False])
def test_a_part_without_state_is_saved_as_an_initial_one_beside_a_part_with_state(
    ranks: Ranks, tmp_path: Path, one_file: bool
) -> None:
    path, key = tmp_path / "a.ckpt", "optimizer_0.state.model.layers.0.mlp.fc1.weight.exp_avg"
    ranks(2, fit_halves, {"tp": 2}, path, one_file, False)
    if one_file:
        content = torch.load(path, weights_only=True)
        shape = content["state_dict"]["model.layers.0.mlp.fc1.weight"].shape
        moments = [state["exp_avg"] for state in content["optimizer_states"][0]["state"].values()]
        (moment,) = [each for each in moments if each.shape == shape]
    else:
        moment = open_checkpoint(path).tensors()[key].materialize()
    rows = moment.flatten(1).any(1)
    assert rows[: len(rows) // 2].any()
    assert not rows[len(rows) // 2 :].any()
    fit_halves({}, path, one_file, True)
    ranks(2, fit_halves, {"tp": 2}, path, one_file, True)
