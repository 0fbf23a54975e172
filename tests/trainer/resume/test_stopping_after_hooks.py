"""Runs that a KillSwitch stops, and that go on: every hook of every step has run once, as in a run without a stop."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch import callbacks as stock_callbacks
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import KillSwitch, MegatronStrategy
from lightning_megatron.testing.trainer import quiet_trainer

BATCHES = 5


class Student(LightningModule):
    """A teacher follows the student at the end of each batch; the module counts batches, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student, self.teacher = nn.Linear(3, 2), nn.Linear(3, 2).requires_grad_(False)
        self.ended: list[int] = []
        self.read: list[float] = []
        self.validated: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.read.append(float(batch.sum()))
        return (self.student(batch) - self.teacher(batch)).square().mean() + torch.rand(())

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validated.append(float(self.student(batch).sum()))

    def on_train_batch_end(self, *_: Any) -> None:
        self.ended.append(self.global_step)
        for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            slow.data.lerp_(fast.data, 0.3)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["ended"] = list(self.ended)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.ended = checkpoint["ended"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.student.parameters(), lr=0.1)


class Counts(Callback):
    """Counts hooks, and keeps the counts in checkpoints; a resumed Lightning itself skips the end of a read epoch."""

    def __init__(self) -> None:
        self.counts = {"start": 0, "end": 0, "validation": 0}

    def on_train_batch_start(self, *_: Any) -> None:
        self.counts["start"] += 1

    def on_train_batch_end(self, *_: Any) -> None:
        self.counts["end"] += 1

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.counts["validation"] += 1

    def state_dict(self) -> dict[str, Any]:
        return dict(self.counts)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts = dict(state)


class Asks(Callback):
    """Makes the file for which the switch looks, during a step, or in the first validation behind it."""

    def __init__(self, path: Path, step: int, in_validation: bool) -> None:
        self.path, self.step, self.in_validation = path, step, in_validation

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step and not self.in_validation:
            self.path.touch()

    def on_validation_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step > self.step and self.in_validation:
            self.path.touch()


class Averages(Callback):
    """Validates with averages of the weights in the place of the weights, as `EMAWeightAveraging` does."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.kept = self.kept or [param.detach().clone() for param in module.student.parameters()]
        self.kept = [kept.to(module.device) for kept in self.kept]

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for kept, param in zip(self.kept, module.student.parameters(), strict=True):
            kept.lerp_(param.detach(), 0.5)

    def on_validation_epoch_start(self, trainer: Any, module: Any) -> None:
        for kept, param in zip(self.kept, module.student.parameters(), strict=True):
            before = param.detach().clone()
            param.data.copy_(kept)
            kept.copy_(before)

    on_validation_epoch_end = on_validation_epoch_start

    def state_dict(self) -> dict[str, Any]:
        return {"kept": [kept.clone() for kept in self.kept]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state["kept"]


class Signal(Callback):
    """Sends this process the signal of a scheduler in the first validation behind a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_validation_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step > self.step and trainer.global_rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            self.step = 1 << 30


class Position(DataLoader[Any]):
    """A loader that goes on where its state says."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__(rows, batch_size=2)  # type: ignore[arg-type]
        self.next = 0

    def __iter__(self) -> Any:
        first = self.next = self.next % BATCHES
        for number, batch in enumerate(super().__iter__()):
            if number >= first:
                self.next += 1
                yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def train(
    folder: Path,
    stop: int | None = None,
    ckpt_path: str | None = None,
    *others: Callback,
    in_validation: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """What a run has left, and the batches that it read."""
    rows = torch.randn(2 * BATCHES, 3, generator=torch.Generator().manual_seed(1))
    counts, module, path = Counts(), Student(), folder / f"stop{stop}"
    callbacks: list[Callback] = [KillSwitch(path, check_every=0.0), counts, ModelCheckpoint(folder, save_last=True)]
    callbacks += [*others] if stop is None else [*others, Asks(path, stop, in_validation)]
    chosen = {"max_epochs": 2, "enable_checkpointing": True, "limit_val_batches": 0, **options}
    trainer = quiet_trainer(MegatronStrategy(), callbacks=callbacks, **chosen)
    loaders = Position(rows), DataLoader[Any](rows, batch_size=4)  # type: ignore[arg-type]
    if stop is None:
        trainer.fit(module, *loaders, ckpt_path=ckpt_path)
    else:
        with pytest.raises(SystemExit):
            trainer.fit(module, *loaders, ckpt_path=ckpt_path)
    weights = {name: value.cpu().clone() for name, value in module.state_dict().items()}
    return {"weights": weights, "ended": module.ended, "counts": counts.counts, "read": module.read} | {
        "validated": module.validated
    }


@pytest.mark.parametrize("stop", [1, BATCHES - 2, 2 * BATCHES - 2], ids=["in mid-epoch", "epoch's end", "run's end"])
def test_what_the_modules_hook_did_in_the_last_step_is_saved(tmp_path: Path, stop: int) -> None:
    whole, first = train(tmp_path / "whole"), train(tmp_path, stop)
    rest = train(tmp_path, ckpt_path=str(tmp_path / "last.ckpt"))
    torch.testing.assert_close(rest["weights"], whole["weights"], rtol=0, atol=0)
    assert rest["ended"] == whole["ended"]
    assert first["read"] + rest["read"] == whole["read"]
    assert rest["counts"] == whole["counts"]


def test_a_validation_that_was_due_comes_once(tmp_path: Path) -> None:
    options: dict[str, Any] = {"limit_val_batches": 1, "val_check_interval": 2, "num_sanity_val_steps": 0}
    whole = train(tmp_path / "whole", **options)
    train(tmp_path, 0, **options)
    rest = train(tmp_path, ckpt_path=str(tmp_path / "last.ckpt"), **options)
    torch.testing.assert_close(rest["weights"], whole["weights"], rtol=0, atol=0)
    assert (rest["ended"], rest["counts"]) == (whole["ended"], whole["counts"])


@pytest.mark.parametrize("in_validation", [False, True], ids=["told in the step before", "told in validation"])
def test_weights_that_a_callback_swaps_for_a_validation_are_saved_as_they_were(
    tmp_path: Path, in_validation: bool
) -> None:
    """A run that is stopped and goes on against one that is not: a save in validation had the averages as weights."""
    options: dict[str, Any] = {"limit_val_batches": 3, "num_sanity_val_steps": 0}
    whole = train(tmp_path / "whole", None, None, Averages(), **options)
    first = train(tmp_path, BATCHES - 1, None, Averages(), in_validation=in_validation, **options)
    rest = train(tmp_path, None, str(tmp_path / "last.ckpt"), Averages(), **options)
    torch.testing.assert_close(rest["weights"], whole["weights"], rtol=0, atol=0)
    assert rest["counts"] == whole["counts"]
    assert first["validated"] + rest["validated"] == whole["validated"]


def averaged(folder: Path, stop: int | None = None, ckpt_path: Path | None = None) -> tuple[Any, ...]:
    """The averages that a run leaves as weights, and its validations, on this rank; ``stop`` ends it by SIGTERM."""
    rows = torch.randn(2 * BATCHES, 3, generator=torch.Generator().manual_seed(1)).repeat_interleave(2, 0)
    module, saver = Student(), ModelCheckpoint(folder, save_last=True)
    callbacks = [stock_callbacks.EMAWeightAveraging(decay=0.5), saver, *([] if stop is None else [Signal(stop)])]
    options = {"max_epochs": 2, "enable_checkpointing": True, "use_distributed_sampler": False}
    trainer = quiet_trainer(MegatronStrategy(), callbacks=callbacks, **options)
    loaders = Position(rows), DataLoader[Any](rows, batch_size=4)  # type: ignore[arg-type]
    with nullcontext() if stop is None else pytest.raises(SystemExit):
        trainer.fit(module, *loaders, ckpt_path=ckpt_path)
    return {name: value.clone() for name, value in module.state_dict().items()}, module.validated


def stopped_and_whole(folder: Path) -> Any:
    whole = averaged(folder / "whole")
    first = averaged(folder / "parts", BATCHES - 1)
    rest = averaged(folder / "parts", None, folder / "parts" / "last.ckpt")
    return whole, (rest[0], first[1] + rest[1])


@pytest.mark.skipif(not hasattr(stock_callbacks, "EMAWeightAveraging"), reason="Lightning has it from 2.6 on")
@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_averages_of_lightning_go_on_behind_a_signal_in_a_validation(ranks: Any, tmp_path: Path, replicas: int) -> None:
    """Held against a run without a stop."""
    for whole, parts in ranks(replicas, stopped_and_whole, tmp_path):
        torch.testing.assert_close(parts, whole, rtol=0, atol=0)
