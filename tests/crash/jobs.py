"""Training jobs of real processes, for scripts that do something to them: how they start, log and end."""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_megatron.checkpoint import verify
from lightning_megatron.testing.trainer import Recorder
from lightning_megatron.testing.workers import PRELOAD

SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_query_groups": 2, "vocab_size": 32}
SIZES |= {"ffn_hidden_size": 24, "head_dim": 8, "vocab_multiple": 2}
PATIENCE = 240.0
"""Seconds for any event, as in ``tests/patience.py``, which a script in this folder does not find."""

Losses = list[tuple[int, str]]


@dataclass(frozen=True)
class Job:
    """A training run.

    Attributes:
        folder: folder of its checkpoints; its log lies beside it.
        layout: a key of the script's ``LAYOUTS``.
        in_background: ``async_save``.
        resumes: True if it goes on from the last checkpoint.
    """

    folder: Path
    layout: str
    in_background: bool = False
    resumes: bool = False

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".resumed" if self.resumes else ".log")

    def output(self, rank: int) -> Path:
        """File with what a rank prints."""
        return self.folder.with_suffix(f".{rank}")

    def losses(self) -> Losses:
        """Step and loss, as far as whole lines were written."""
        if not self.log.exists():
            return []
        lines = self.log.read_text().splitlines(keepends=True)
        pairs = [line.split() for line in lines if line.endswith("\n")]
        return [(int(step), loss) for step, loss in pairs]


class Log(Recorder):
    """Writes each loss to a file at once, all of its bits."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if "train_loss" in metrics and dist.get_rank() == 0:
            with self.file.open("a") as stream:
                stream.write(f"{step} {float(metrics['train_loss']).hex()}\n")


def begin_rank(job: Job, rank: int, ranks: int, store: str, timeout: float = PATIENCE) -> timedelta:
    """First thing in a rank: its output goes to a file, and it joins the others; the timeout, for the strategy."""
    output = os.open(job.output(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=limit)
    return limit


def start(work: Callable[[Any, int, str], None], job: Job, ranks: int, daemon: bool = True) -> list[BaseProcess]:
    """Real processes, forked from a server that has imported everything and started nothing.

    Args:
        work: life of one rank: called with the job, its rank and the path of a store.
        job: job for ``work``.
        ranks: number of processes.
        daemon: False for ranks that may have children.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, "omegaconf", "fsspec.implementations.local", "lightning_megatron.data"])
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    store = tempfile.mktemp(dir=job.folder.parent)
    processes: list[BaseProcess] = [
        context.Process(target=work, args=(job, rank, store), daemon=daemon) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    return processes


def finish(job: Job, processes: list[BaseProcess], code: int = 0) -> Losses:
    """Wait for all ranks to end with a status; what they logged."""
    for process in processes:
        process.join(PATIENCE)
    codes = [process.exitcode for process in processes]
    assert codes == [code] * len(processes), (job, codes, job.output(0).read_text()[-3000:])
    return job.losses()


def wait_until(what: Callable[[], bool], processes: list[BaseProcess], pause: float = 0.01) -> bool:
    """True once it has come about; False if the job ended before."""
    begun = time.monotonic()
    while not what():
        if not all(process.is_alive() for process in processes):
            return False
        assert time.monotonic() - begun < PATIENCE
        time.sleep(pause)
    return True


def final_names(folder: Path) -> set[str]:
    """Names of checkpoints; a kill may leave a link to one that was never complete, which has none."""
    return {path.name for path in folder.glob("*") if path.exists()} - {".unfinished"}


def is_saving(folder: Path) -> bool:
    """True while a checkpoint of the folder has no name yet."""
    try:
        return any(name.endswith(".saving") for name in os.listdir(folder / ".unfinished"))
    except FileNotFoundError:
        return False


def faults(folder: Path) -> list[str]:
    """Faults of everything that has a final name."""
    return [f"{name}: {fault}" for name in sorted(final_names(folder)) for fault in verify(folder / name)]


def step_of(checkpoint: Path) -> int:
    file = checkpoint / "meta.pt" if checkpoint.is_dir() else checkpoint
    return torch.load(file, map_location="cpu", weights_only=True)["global_step"]
