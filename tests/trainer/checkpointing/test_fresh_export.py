"""An export has no optimizer state of parameters without a gradient so far: another run begins it at the first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from safetensors.torch import load_file
from test_fresh_state import LATE, OPTIMIZERS, ROWS, STEPS, Late, LosesItsPart, Values, assert_same
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from lightning_megatron import GPTModule, MegatronStrategy
from lightning_megatron.testing.trainer import quiet_trainer

Ranks = Callable[..., list[Any]]
MOMENT = {"nadam": "exp_avg", "dampened": "momentum_buffer", "adamw": "exp_avg"}


class Shifted(Late):
    """The module in a run that begins with the state of some steps, with a layer that is unused or frozen before."""

    def __init__(self, optimizer: str, done: int = 0, late: int = LATE, frozen: bool = False) -> None:
        super().__init__(optimizer)
        self.done, self.at, self.frozen = done, late, frozen
        self.late.requires_grad_(not frozen)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if self.frozen and self.done + self.global_step >= self.at:
            self.late.requires_grad_(True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.first(batch)
        if self.done + self.global_step >= self.at:
            hidden = self.late(hidden)
        return self.last(hidden).square().mean()


class Exports(Callback):
    """Export before some steps, and import before others; ``zeros`` fills an export as earlier versions did."""

    def __init__(self, write: dict[int, Path], read: dict[int, Path], zeros: bool = False) -> None:
        self.write, self.read, self.zeros = write, read, zeros

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        if path := self.read.get(trainer.global_step):
            strategy.load_optimizer_state(path)
        if path := self.write.get(trainer.global_step):
            for sharded in strategy._params.sharded if self.zeros else ():
                sharded.init_state()
            strategy.export_optimizer_state(path)


def fit(
    module: LightningModule,
    steps: int,
    write: dict[int, Path] | None = None,
    read: dict[int, Path] | None = None,
    zeros: bool = False,
    **strategy: Any,
) -> Values:
    exports: Any = Exports(write or {}, read or {}, zeros)
    seed_everything(6, verbose=False)
    arguments: dict[str, Any] = {"limit_val_batches": 0, "use_distributed_sampler": False}
    trainer = quiet_trainer(MegatronStrategy(**strategy), max_steps=steps, callbacks=[exports], **arguments)
    trainer.fit(module, DataLoader([ROWS] * steps, batch_size=None))  # type: ignore[arg-type]
    return {name: value.cpu().clone() for name, value in module.state_dict().items()}


def shifted(optimizer: str, *arguments: Any, **named: Any) -> Shifted:
    seed_everything(5, verbose=False)
    return Shifted(optimizer, *arguments, **named)


def fit_late(
    optimizer: str, folder: Path, step: int | None, *, frozen: bool = False, zeros: bool = False, **strategy: Any
) -> Values:
    """All steps, with exports before steps 0, 2 and 4; or those after ``step``, with the export made there."""
    if step is None:
        files = {at: folder / f"{at}.safetensors" for at in (0, 2, 4)}
        return fit(shifted(optimizer, frozen=frozen), STEPS, files, zeros=zeros, **strategy)
    read, again = {0: folder / f"{step}.safetensors"}, {0: folder / "again.safetensors"}
    return fit(shifted(optimizer, step, frozen=frozen), STEPS - step, again, read, **strategy)


@pytest.mark.parametrize("step", [0, 2, 4])
@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "adafactor"])
def test_a_run_goes_on_from_an_export_without_it(tmp_path: Path, optimizer: str, step: int) -> None:
    straight = fit_late(optimizer, tmp_path, None)
    assert_same(fit_late(optimizer, tmp_path, step), straight)
    file = tmp_path / f"{step}.safetensors"
    assert (tmp_path / "again.safetensors").read_bytes() == file.read_bytes()
    if moment := MOMENT.get(optimizer):
        found = load_file(file)
        assert "optimizer_0.state.late.weight.master" in found
        assert (f"optimizer_0.state.late.weight.{moment}" in found) == (step > LATE)
        assert (f"optimizer_0.state.first.weight.{moment}" in found) == (step > 0)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("optimizer", ["nadam", "dampened"])
def test_ranks_that_share_out_state_go_on_from_it_bit_by_bit(
    ranks: Ranks, tmp_path: Path, optimizer: str, frozen: bool
) -> None:
    for strategy in ({}, {"distributed_optimizer": False}):
        straight = ranks(2, fit_late, optimizer, tmp_path, None, frozen=frozen, **strategy)
        for found in ranks(2, fit_late, optimizer, tmp_path, 2, frozen=frozen, **strategy):
            assert_same(found, straight[0])
    torch.testing.assert_close(fit_late(optimizer, tmp_path, 2, frozen=frozen), straight[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("optimizer", ["nadam", "dampened", "adamw"])
def test_state_that_an_optimizer_has_is_dropped_where_an_export_has_none(tmp_path: Path, optimizer: str) -> None:
    """The layer has had gradients since step 3; the export before step 2, taken back before step 5, has none."""
    file = tmp_path / "a.safetensors"
    back = fit(shifted(optimizer, late=3), 7, {2: file}, {5: file})
    assert_same(back, fit(shifted(optimizer, late=2), 4))


def test_an_earlier_export_has_zeros_and_loads(tmp_path: Path) -> None:
    straight = fit_late("adamw", tmp_path, None, zeros=True)
    for step in (0, 2):
        assert not load_file(tmp_path / f"{step}.safetensors")["optimizer_0.state.late.weight.exp_avg"].any()
        assert_same(fit_late("adamw", tmp_path, step), straight)


@pytest.mark.parametrize("step", [0, 2])
def test_an_export_of_another_kind_or_model_is_refused_by_name(tmp_path: Path, step: int) -> None:
    fit_late("plain", tmp_path, None)
    with pytest.raises(Exception, match=r"optimizer_0\.state\.last\.weight\.exp_avg: not in the file"):
        fit_late("nadam", tmp_path, step)
    module = shifted("plain")
    module.more = nn.Linear(4, 4)
    with pytest.raises(Exception, match=r"optimizer_0\.state\.more\.weight\.master: not in the file"):
        fit(module, 1, read={0: tmp_path / f"{step}.safetensors"})


def test_groups_of_an_export_decide_what_state_is_read(tmp_path: Path) -> None:
    """Momentum of a file goes to an optimizer that was made without any."""

    class Plain(Shifted):
        def configure_optimizers(self) -> optim.Optimizer:
            return optim.SGD(self.parameters(), lr=1.0)

    straight = fit_late("dampened", tmp_path, None)
    seed_everything(5, verbose=False)
    assert_same(fit(Plain("plain", 2), STEPS - 2, read={0: tmp_path / "2.safetensors"}), straight)


def fit_halves(layout: dict[str, Any], write: dict[int, Path], read: dict[int, Path]) -> None:
    trainer = quiet_trainer(
        MegatronStrategy(**layout), max_steps=2, callbacks=[LosesItsPart(), Exports(write, read)], limit_val_batches=0
    )
    sizes: dict[str, Any] = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 16}
    row = torch.arange(5)
    rows: Any = [{"tokens": row[:-1], "labels": row[1:]}] * 2
    trainer.fit(GPTModule("gpt-tiny", **sizes, max_position_embeddings=8), DataLoader(rows))


def test_a_part_without_state_is_exported_as_an_initial_one_beside_a_part_with_state(
    ranks: Ranks, tmp_path: Path
) -> None:
    file = tmp_path / "a.safetensors"
    ranks(2, fit_halves, {"tp": 2}, {1: file}, {})
    moment = load_file(file)["optimizer_0.state.model.layers.0.mlp.fc1.weight.exp_avg"]
    rows = moment.flatten(1).any(1)
    assert rows[: len(rows) // 2].any()
    assert not rows[len(rows) // 2 :].any()
    fit_halves({}, {}, {0: file})
    ranks(2, fit_halves, {"tp": 2}, {}, {0: file})
