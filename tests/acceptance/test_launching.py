"""Checks 44 and 45: one script under every launcher, and the ends of jobs by signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from socket import socket
from typing import Any

import pytest
from layouts import DP2, TP2, Layout, Ranks, language_model, loader, on_all, trainer_for
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_megatron import MegatronStrategy
from lightning_megatron.checkpoint import verify
from lightning_megatron.device import CUDA
from lightning_megatron.machine.job_environment import own_environment
from lightning_megatron.testing import one_card
from lightning_megatron.testing.trainer import PoolEnvironment, Recorder, kind_in_tests

# 44

SCRIPT = """
import lightning.pytorch as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_megatron import MegatronStrategy

torch.set_num_threads(1)
L.seed_everything(1, verbose=False)
trainer = L.Trainer(
    accelerator="cpu", strategy=MegatronStrategy(), max_steps=2, limit_val_batches=0, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, {devices}
)
trainer.fit(BoringModel())
total = trainer.strategy.reduce(torch.ones(()), reduce_op="sum")
print(f"rank {{trainer.global_rank}} of {{trainer.world_size}} sums to {{int(total)}}", flush=True)
"""
POD = """num_nodes=2, devices=1, plugins=[__import__("lightning").fabric.plugins.environments.KubeflowEnvironment()]"""


def slurm(rank: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    ["slurm", "kubeflow", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("lightning", "torchrun"))],
)
def test_44_the_same_script_runs_under_every_launcher(tmp_path: Path, launcher: str) -> None:
    """Pods without torchrun need two more arguments of the Trainer, which the error names that they get otherwise."""
    with socket() as listening:
        listening.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listening.getsockname()[1])}
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(devices=POD if launcher == "kubeflow" else "devices=2"))
    words = [sys.executable, str(script)]
    if launcher == "torchrun":
        words[1:1] = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={place['MASTER_PORT']}"]
    variables: list[dict[str, str]] = [{}]
    if launcher == "slurm":
        variables = [place | slurm(rank) for rank in range(2)]
    if launcher == "kubeflow":
        variables = [place | {"WORLD_SIZE": "2", "RANK": str(rank)} for rank in range(2)]
    jobs = [
        subprocess.Popen(words, env=own_environment(**each), stdout=subprocess.PIPE, text=True, cwd=tmp_path)
        for each in variables
    ]
    printed = "".join(job.communicate(timeout=300)[0] for job in jobs)
    assert [job.returncode for job in jobs] == [0] * len(jobs)
    assert sorted(re.findall(r"rank . of . sums to .", printed)) == [f"rank {rank} of 2 sums to 2" for rank in range(2)]


# 45


class Signalled(Callback):
    """Sends its rank a signal in a step."""

    def __init__(self, number: int, step: int) -> None:
        self.number, self.step = number, step

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and trainer.global_rank == 1:
            os.kill(os.getpid(), self.number)


def run(layout: Layout, folder: Path, number: int | None, ckpt_path: str | None = None) -> Any:
    """Exit status and losses."""
    recorder, callbacks = Recorder(), [ModelCheckpoint(folder), *([] if number is None else [Signalled(number, 2)])]
    trainer = trainer_for(layout, logger=recorder, max_epochs=2, enable_checkpointing=True, callbacks=callbacks)
    status = 0
    try:
        trainer.fit(language_model(), loader(layout), ckpt_path=ckpt_path)
    except SystemExit as leave:
        status = int(leave.code or 0)
    return status, recorder.series("train_loss")


@pytest.mark.parametrize("layout", [TP2, DP2], ids=str)
def test_45_sigterm_ends_all_ranks_with_a_checkpoint_that_goes_on(ranks: Ranks, tmp_path: Path, layout: Layout) -> None:
    _, whole = on_all(ranks, layout, run, tmp_path / "whole", None)
    status, begun = on_all(ranks, layout, run, tmp_path, signal.SIGTERM)
    assert status == 128 + signal.SIGTERM
    assert verify(tmp_path / "last.ckpt") == []
    status, rest = on_all(ranks, layout, run, tmp_path, None, str(tmp_path / "last.ckpt"))
    assert status == 0
    assert 2 < len(begun) < len(whole)
    exact = kind_in_tests() is not CUDA  # whose kernels add in another order each time
    assert [*begun, *rest] == (whole if exact else pytest.approx(whole, rel=1e-6))


class Slurm(PoolEnvironment, SLURMEnvironment):
    """Slurm's environment over the processes of the pool."""

    def __init__(self) -> None:
        SLURMEnvironment.__init__(self, auto_requeue=True)


def requeued(folder: Path, number: int | None, ckpt_path: str | None) -> tuple[int, int]:
    """Exit status and steps."""
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=MegatronStrategy(),
        plugins=[Slurm()],
        default_root_dir=folder,
        max_steps=8,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[] if number is None else [Signalled(number, 2)],
    )
    status = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        patch.setenv("SLURM_JOB_ID", "77")
        try:
            trainer.fit(BoringModel(), ckpt_path=ckpt_path)
        except SystemExit as leave:
            status = int(leave.code or 0)
    return status, trainer.global_step


@pytest.mark.skipif(one_card.enabled(), reason="ranks that share a card count as a machine each")
def test_45_a_job_that_slurm_requeues_goes_on_from_its_hpc_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/words\n')
    (tmp_path / "scontrol").chmod(0o755)
    for status, step in ranks(2, requeued, tmp_path, signal.SIGUSR1, None):
        assert status == 128 + signal.SIGUSR1
        assert 2 < step < 8
    assert (tmp_path / "words").read_text() == "requeue 77\n"
    assert verify((tmp_path / "hpc_ckpt_1.ckpt").resolve()) == []
    assert ranks(2, requeued, tmp_path, None, "hpc") == [(0, 8)] * 2
