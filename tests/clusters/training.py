"""Small training jobs that are started by real launchers, and what they have trained on."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from lightning_megatron.machine.job_environment import own_environment

STEPS = 40
SECONDS = 0.15
"""Time of a step at least, so that a signal meets a run that is under way."""

_MODULE = """\
import time

import torch
from lightning.pytorch import LightningDataModule

from lightning_megatron import GPTModule
from lightning_megatron.data import MegatronSampler, ResumableDataLoader


class Texts(LightningDataModule):
    def train_dataloader(self):
        tokens = torch.randint(32, (400, 9), generator=torch.Generator().manual_seed(2))
        rows = [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]
        strategy = self.trainer.strategy
        replicas = dict(dp_rank=strategy.data_parallel_rank, dp_size=strategy.data_parallel_size)
        return ResumableDataLoader(rows, batch_sampler=MegatronSampler(len(rows), batch_size=4, **replicas))


class Slow(GPTModule):
    def on_train_batch_end(self, *_):
        time.sleep(SECONDS)
"""


def recipe(folder: Path, seconds: float = SECONDS) -> Path:
    """A recipe of two ranks, with a module of its own beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "slow_module.py").write_text(_MODULE.replace("SECONDS", str(seconds)))
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 32, "vocab_multiple": 2}
    sizes |= {"num_query_groups": 2, "ffn_hidden_size": 24, "head_dim": 8, "hidden_dropout": 0.1}
    saver = {"dirpath": "run/checkpoints", "save_last": "link", "every_n_train_steps": 1000, "save_top_k": -1}
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "run", "name": "log"}}
    logger["init_args"] |= {"flush_logs_every_n_steps": 1}
    trainer = {
        "accelerator": "cpu",
        "devices": 2,
        "strategy": {"class_path": "lightning_megatron.MegatronStrategy", "init_args": {"tp": 2}},
        "max_steps": STEPS,
        "limit_val_batches": 0,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": "run",
        "logger": logger,
        "callbacks": [{"class_path": "ModelCheckpoint", "init_args": saver}],
    }
    model = {"class_path": "slow_module.Slow", "init_args": {"config": "llama-tiny", "lr": 0.01}, "dict_kwargs": sizes}
    contents = {"seed_everything": 7, "trainer": trainer, "model": model, "data": "slow_module.Texts"}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(contents))
    return folder / "recipe.yaml"


def variables(folder: Path, **more: str) -> dict[str, str]:
    """Environment of a job: one thread a process, loopback alone, the module and this package on the path."""
    root = str(Path(__file__).parents[2])
    given = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
    return own_environment(**given, PYTHONPATH=f"{folder}{os.pathsep}{root}", **more)


def losses(folder: Path) -> dict[int, float]:
    """Loss of every step, over all runs in a folder.

    Raises:
        AssertionError: if two runs have trained a step with different losses.
    """
    found: dict[int, float] = {}
    for path in sorted(folder.glob("run/log/version_*/metrics.csv")):
        with path.open() as file:
            for row in csv.DictReader(file):
                if row.get("train_loss"):
                    step, loss = int(row["step"]), float(row["train_loss"])
                    assert found.setdefault(step, loss) == loss, (path, step)
    return found


def runs(folder: Path) -> int:
    """Number of runs that have logged something."""
    return len(list(folder.glob("run/log/version_*/metrics.csv")))


def steps_done(folder: Path) -> int:
    """Number of steps whose loss is in a file; 0 while one is just written."""
    try:
        return len(losses(folder))
    except (OSError, ValueError, KeyError):
        return 0


def uninterrupted(folder: Path) -> dict[int, float]:
    """Losses of a run by torchrun that nobody ends."""
    recipe(folder, seconds=0.0)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words += ["-m", "lightning_megatron.tools.cli.main", "fit", "--config", "recipe.yaml"]
    done = subprocess.run(words, cwd=folder, env=variables(folder), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = losses(folder)
    assert sorted(found) == list(range(STEPS))
    return found


def which(name: str) -> str | None:
    """Path of a program, or of one below the folder ``MPI_PREFIX``, where packages were unpacked."""
    prefix = os.environ.get("MPI_PREFIX")
    if prefix is None:
        return shutil.which(name)
    return shutil.which(name, path=os.pathsep.join(str(Path(prefix, part)) for part in ("usr/bin", "bin")))
