"""Signals that end a run: what MegatronStrategy does by itself. Random moments: see tests/crash/signalling.py."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

from lightning_megatron import GPTModule, KillSwitch, MegatronStrategy
from lightning_megatron.checkpoint import verify
from lightning_megatron.data import MegatronSampler, ResumableDataLoader
from lightning_megatron.lightning.stopping.signals import StopSignals
from lightning_megatron.lightning.stopping.worker_signals import PatientWorker
from lightning_megatron.lightning.strategy.kill_switch import checkpoint_path
from lightning_megatron.testing import one_card
from lightning_megatron.testing.trainer import PoolEnvironment, Recorder, quiet_trainer

SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 32, "vocab_multiple": 2}
SIZES |= {"num_query_groups": 2, "ffn_hidden_size": 24, "head_dim": 8, "hidden_dropout": 0.1}
STEPS = 6
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Kill(Callback):
    """Sends this process a signal, on one rank or a moment later on each next one."""

    def __init__(self, number: int, *, step: int, in_validation: bool = False, rank: int | None = None) -> None:
        self.number, self.step, self.in_validation, self.rank = number, step, in_validation, rank

    def _act(self, trainer: Trainer) -> None:
        if trainer.global_step == self.step and self.rank in (None, trainer.global_rank):
            self.step = -1
            if self.rank is None and trainer.global_rank > 0:
                threading.Timer(0.2 * trainer.global_rank, os.kill, (os.getpid(), self.number)).start()
            else:
                os.kill(os.getpid(), self.number)  # the handler runs before this returns

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if not self.in_validation:
            self._act(trainer)

    def on_validation_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int, _: int = 0) -> None:
        if self.in_validation and batch_idx == 1:
            self._act(trainer)


class Draws(Callback):
    """Validates with random numbers, as kernels that take a seed and masked language models do."""

    def on_validation_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        torch.rand(3, device=module.device)


def texts() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(32, (STEPS * 4, 9), generator=torch.Generator().manual_seed(2))
    return [{"tokens": t[:-1], "labels": t[1:]} for t in tokens]


def train(folder: Path, layout: dict[str, int], *callbacks: Callback, ckpt_path: str | None = None) -> Any:
    """Exit status, training losses, validation losses; handlers must be what they were."""
    seed_everything(7, verbose=False)
    recorder, rows = Recorder(), texts()
    trainer = quiet_trainer(
        MegatronStrategy(**layout),
        max_epochs=2,
        logger=recorder,
        enable_checkpointing=True,
        val_check_interval=3,
        callbacks=[
            *callbacks,
            Draws(),
            ModelCheckpoint(folder, monitor="val_loss", filename="{step}", save_last="link"),
        ],
    )
    before = [signal.getsignal(number) for number in SIGNALS]
    batches = MegatronSampler(len(rows), batch_size=4)
    loader = ResumableDataLoader(rows, batch_sampler=batches)  # type: ignore[arg-type]
    held_out = DataLoader(rows[:12], batch_size=2)  # type: ignore[arg-type]
    code = 0
    try:
        trainer.fit(GPTModule("llama-tiny", lr=1e-2, **SIZES), loader, held_out, ckpt_path=ckpt_path)
    except SystemExit as leave:
        code = int(leave.code or 0)
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert not any(isinstance(callback, KillSwitch) for callback in trainer.callbacks)
    return code, recorder.series("train_loss"), recorder.series("val_loss")


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tp": 2}, {}], ids=["tp2", "dp2"])
def test_a_run_that_is_stopped_in_validation_validates_anew_and_goes_on_bit_for_bit(ranks, tmp_path, layout):
    whole = ranks(2, train, tmp_path / "whole", layout)[0]
    for step in (3, 6):  # in mid-epoch, and at its end
        folder = tmp_path / str(step)
        kill = Kill(signal.SIGTERM, step=step, in_validation=True, rank=1)
        for code, losses, validations in ranks(2, train, folder, layout, kill):
            assert code == 143
            assert losses == whole[1][:step]
            assert validations == whole[2][: step // 3 - 1]
        assert verify(folder / "last.ckpt") == []
        code, losses, validations = ranks(2, train, folder, layout, ckpt_path="last")[0]
        assert (code, losses, validations) == (0, whole[1][step:], whole[2][step // 3 - 1 :])


def test_a_run_whose_steps_are_over_still_ends_with_the_signals_status(ranks, tmp_path):
    # The last step's signal is learnt when training ends; what is saved is complete.
    for code, losses, _ in ranks(2, train, tmp_path, {"tp": 2}, Kill(signal.SIGTERM, step=2 * STEPS - 1, rank=0)):
        assert code == 143
        assert len(losses) == 2 * STEPS
    code, losses, _ = ranks(2, train, tmp_path, {"tp": 2}, ckpt_path="last")[0]
    assert (code, losses) == (0, [])


# Slurm


class Slow(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.15)  # the late signal comes while the job is still there
        return super().training_step(batch, batch_idx)


class Slurm(PoolEnvironment, SLURMEnvironment):
    def __init__(self) -> None:
        SLURMEnvironment.__init__(self, auto_requeue=True)


def requeued(folder: Path, ckpt_path: str | None, kill: bool) -> Any:
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
    os.environ["SLURM_JOB_ID"] = "77"
    seed_everything(7, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=MegatronStrategy(),
        plugins=[Slurm()],
        default_root_dir=folder,
        max_steps=10,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Kill(signal.SIGUSR1, step=2)] if kill else [],
    )
    code = None
    try:
        # However late the signal is, the rank waits for it.
        with mock.patch.object(StopSignals.await_own, "__defaults__", (60.0,)):
            trainer.fit(Slow(), ckpt_path=ckpt_path)
    except SystemExit as leave:
        code = leave.code
    finally:
        os.environ["PATH"] = os.environ["PATH"].partition(os.pathsep)[2]
        del os.environ["SLURM_JOB_ID"]
    return code, trainer.global_step


@pytest.mark.skipif(one_card.enabled(), reason="ranks that share a card count as a machine each")
def test_on_slurm_ranks_that_are_told_apart_save_once_and_the_job_is_requeued(ranks, tmp_path):
    script = tmp_path / "scontrol"
    script.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/words\n')
    script.chmod(0o755)
    for code, step in ranks(2, requeued, tmp_path, None, True):
        assert code == 138
        assert 2 < step < 10
    assert (tmp_path / "words").read_text() == "requeue 77\n"
    assert (tmp_path / "hpc_ckpt_1.ckpt").resolve().name == "last.ckpt"
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt" / "meta.pt", weights_only=True)
    assert saved["global_step"] == step
    assert ranks(2, requeued, tmp_path, "hpc", False) == [(None, 10)] * 2


# One process


def alone(folder: Path, strategy: MegatronStrategy, *callbacks: Callback, **options: Any) -> Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"default_root_dir": folder, "max_steps": 8, "limit_val_batches": 0, "accelerator": "cpu", "devices": 1}
    return Trainer(strategy=strategy, callbacks=list(callbacks), **quiet | options)


def test_nobody_saves_where_nobody_wants_checkpoints(tmp_path: Path) -> None:
    trainer = alone(tmp_path, MegatronStrategy(), Kill(signal.SIGINT, step=2), enable_checkpointing=False)
    with pytest.raises(SystemExit) as leave:
        trainer.fit(BoringModel())
    assert leave.value.code == 130
    assert trainer.global_step == 4
    assert not list(tmp_path.rglob("*.ckpt"))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_signals_are_left_to_lightning_where_that_is_wanted(tmp_path: Path) -> None:
    switch = alone(tmp_path, MegatronStrategy(save_on_signal=False), Kill(signal.SIGINT, step=2))
    with pytest.raises(SystemExit) as leave:
        switch.fit(BoringModel())
    assert leave.value.code == 1  # KeyboardInterrupt, in Lightning's hands
    assert not list(tmp_path.rglob("*.ckpt"))


def test_a_kill_switch_of_the_users_is_the_only_one_and_says_how_to_exit(tmp_path: Path) -> None:
    mine = KillSwitch(signals=("SIGUSR2",), exit_code=7)
    trainer = alone(tmp_path, MegatronStrategy(), mine, Kill(signal.SIGUSR2, step=2), enable_checkpointing=False)
    with pytest.raises(SystemExit) as leave:
        trainer.fit(BoringModel())
    assert leave.value.code == 7
    assert mine.reason == "SIGUSR2"
    assert (tmp_path / "checkpoints" / "last.ckpt").is_dir()
    assert trainer.callbacks.count(mine) == 1  # type: ignore[attr-defined]


def test_another_runs_last_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path)
    trainer = alone(tmp_path, MegatronStrategy(), saver)
    assert checkpoint_path(trainer) == str(tmp_path / "last.ckpt")
    (tmp_path / "last.ckpt").mkdir()
    assert checkpoint_path(trainer) == str(tmp_path / "last-v1.ckpt")
    saver.last_model_path = str(tmp_path / "last.ckpt")
    assert checkpoint_path(trainer) == str(tmp_path / "last.ckpt")
    saver.last_model_path = ""
    trainer.ckpt_path = str(tmp_path / "last-v4.ckpt")
    assert checkpoint_path(trainer) == str(tmp_path / "last-v4.ckpt")


class Workers(BoringModel):
    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(8, 32), num_workers=1, multiprocessing_context="fork")  # type: ignore[arg-type]

    def on_train_start(self) -> None:
        assert isinstance(self.trainer.train_dataloader.worker_init_fn, PatientWorker)


def test_workers_of_loaders_outlive_signals(tmp_path: Path) -> None:
    trainer = alone(tmp_path, MegatronStrategy(), enable_checkpointing=False, max_steps=2)
    trainer.fit(Workers())
    assert trainer.global_step == 2
