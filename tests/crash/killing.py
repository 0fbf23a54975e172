"""Kills training jobs at random moments and resumes them; what comes out must be the run that nobody killed.

A trial is a job of two processes, dropout on, of which one or both get SIGKILL: half of the trials at any time, half
while a checkpoint is being saved, seen by its temporary directory. Then ``ckpt_path="last"`` must go on from the newest
checkpoint, every loss of either run must be that of the uninterrupted run, bit for bit, and everything that has a final
name must pass ``verify``, right after the kill and at the end.

Run: ``python tests/crash/killing.py [--trials 60] [--seed 0]``: half of the trials with ``async_save``, half without.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron import GPTModule, MegatronStrategy
from lightning_megatron.checkpoint import verify
from lightning_megatron.data import MegatronSampler, ResumableDataLoader
from lightning_megatron.testing.trainer import Recorder, quiet_trainer
from lightning_megatron.testing.workers import PRELOAD

RANKS, STEPS, EVERY = 2, 24, 3
LAYOUTS: dict[str, dict[str, Any]] = {"tp2": {"tp": 2}, "dp2": {}, "pp2": {"pp": 2, "micro_batch_size": 2}}
SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_query_groups": 2, "vocab_size": 32}
SIZES |= {"ffn_hidden_size": 24, "head_dim": 8, "vocab_multiple": 2}
PATIENCE = 120.0  # seconds


@dataclass(frozen=True)
class Job:
    """A training run.

    Attributes:
        folder: of its checkpoints; its log lies beside it.
        layout: a key of ``LAYOUTS``.
        in_background: ``async_save``.
        save_last: as of ``ModelCheckpoint``.
        resumes: whether it goes on from the last checkpoint.
    """

    folder: Path
    layout: str
    in_background: bool = False
    save_last: Any = "link"
    resumes: bool = False

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".resumed" if self.resumes else ".log")

    def losses(self) -> list[tuple[int, str]]:
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


def work(job: Job, rank: int, store: str) -> None:
    """One rank of a job."""
    output = os.open(job.folder.with_suffix(f".{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    torch.set_num_threads(1)
    limit = timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=limit)
    seed_everything(7, verbose=False)
    saver = ModelCheckpoint(job.folder, filename="{step}", every_n_train_steps=EVERY, save_last=job.save_last)
    trainer = quiet_trainer(
        MegatronStrategy(**LAYOUTS[job.layout], async_save=job.in_background, timeout=limit),
        max_steps=STEPS,
        logger=Log(job.log),
        enable_checkpointing=True,
        use_distributed_sampler=False,
        callbacks=[saver],
    )
    tokens = torch.randint(32, (STEPS * 4, 9), generator=torch.Generator().manual_seed(2))
    rows = [{"tokens": t[:-1], "labels": t[1:]} for t in tokens]
    own = rows[rank::2] if job.layout == "dp2" else rows
    batches = MegatronSampler(len(own), batch_size=len(own) // STEPS)
    module = GPTModule("llama-tiny", lr=1e-2, hidden_dropout=0.1, attention_dropout=0.1, **SIZES)
    loader = ResumableDataLoader(own, batch_sampler=batches)  # type: ignore[arg-type]
    trainer.fit(module, loader, ckpt_path="last" if job.resumes else None)
    os._exit(0)  # leaving a gloo group may hang


def start(job: Job) -> list[BaseProcess]:
    """Real processes, forked from a server that has imported everything and started nothing."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, "omegaconf", "fsspec.implementations.local", "lightning_megatron.data"])
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    store = tempfile.mktemp(dir=job.folder.parent)
    processes = [context.Process(target=work, args=(job, rank, store), daemon=True) for rank in range(RANKS)]
    for process in processes:
        process.start()
    return processes


def finish(job: Job, processes: list[BaseProcess]) -> list[tuple[int, str]]:
    """Wait for all ranks; what they logged."""
    for process in processes:
        process.join(PATIENCE)
    codes = [process.exitcode for process in processes]
    assert codes == [0] * RANKS, (job, codes)
    return job.losses()


def wait_until(what: Callable[[], bool], processes: list[BaseProcess], pause: float = 0.01) -> bool:
    """Whether it came about before the job ended."""
    begun = time.monotonic()
    while not what():
        if not all(process.is_alive() for process in processes):
            return False
        assert time.monotonic() - begun < PATIENCE
        time.sleep(pause)
    return True


def final_names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*")} - {".unfinished"}


def is_saving(folder: Path) -> bool:
    return any(name.endswith(".saving") for name in _names(folder / ".unfinished"))


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def strike(job: Job, processes: list[BaseProcess], aims: bool, dice: random.Random) -> str:
    """Kill one rank, or all of them; what the folder says about the moment."""
    if aims:
        after = dice.randrange(STEPS // EVERY) * EVERY  # losses that are logged by then
        wait_until(lambda: len(job.losses()) >= after, processes, 0.001)
        wait_until(lambda: is_saving(job.folder), processes, 0.0)
        time.sleep(dice.choice((0.0, dice.uniform(0.0, 0.05))))
    else:
        wait_until(lambda: bool(job.losses()), processes)
        time.sleep(dice.uniform(0.0, 2.0))
    victims = dice.choice([[process] for process in processes] + [processes])
    for process in victims:
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
    for process in processes:
        process.join(PATIENCE)
        assert not process.is_alive(), (job, "the survivor must find out by itself")
    if all(process.exitcode == 0 for process in processes):
        return "too late"
    return "inside a save" if is_saving(job.folder) else "between saves"


def faults(folder: Path) -> list[str]:
    """What is wrong with anything that has a final name."""
    return [f"{name}: {fault}" for name in sorted(final_names(folder)) for fault in verify(folder / name)]


def step_of(checkpoint: Path) -> int:
    return torch.load(checkpoint / "meta.pt", weights_only=True)["global_step"]


def trial(job: Job, whole: list[tuple[int, str]], aims: bool, dice: random.Random) -> str:
    """One job, killed and resumed; when it was hit.

    Raises:
        AssertionError: if anything is not as it should be.
    """
    processes = start(job)
    moment = strike(job, processes, aims, dice)
    assert not (found := faults(job.folder)), (job, moment, found)
    losses = job.losses()
    assert losses == whole[: len(losses)], (job, moment, losses)
    steps = {name: step_of(job.folder / name) for name in final_names(job.folder)}
    last, newest = steps.get("last.ckpt", 0), max(steps.values(), default=0)
    # `last.ckpt` is saved, or linked, after the other one: it may be the one before.
    assert last in (newest, newest - EVERY), (job, moment, steps)
    again = replace(job, resumes=True)
    resumed = finish(again, start(again))
    assert resumed == whole[last:], (job, moment, steps, resumed)
    assert not (found := faults(job.folder)), (job, moment, found)
    # A state saved before the first link was made does not know of it: Lightning then makes `last-v1.ckpt` beside it.
    assert max(map(step_of, job.folder.glob("last*.ckpt"))) == STEPS, (job, moment, final_names(job.folder))
    shutil.rmtree(job.folder)
    return moment


def run(trials: int, seed: int, scratch: Path, tell: Callable[[str], None] = print) -> Counter[str]:
    """All trials, one after another; how many were hit when."""
    dice = random.Random(seed)
    whole = {}
    for layout in LAYOUTS:
        job = Job(scratch / f"whole-{layout}", layout)
        whole[layout] = finish(job, start(job))
        assert [step for step, _ in whole[layout]] == list(range(STEPS))
    count: Counter[str] = Counter()
    for number in range(trials):
        job = Job(
            scratch / f"trial-{number}",
            layout=list(LAYOUTS)[number // 4 % len(LAYOUTS)],
            in_background=number % 2 == 0,
            save_last=dice.choice(("link", True)),
        )
        moment = trial(job, whole[job.layout], aims=number // 2 % 2 == 0, dice=dice)
        kind = "async" if job.in_background else "sync"
        count[f"{kind}, {moment}"] += 1
        tell(f"{number}: {kind}, {job.layout}, save_last={job.save_last}: killed {moment}; resumed bit for bit")
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for moment, number in sorted(run(options.trials, options.seed, Path(scratch)).items()):
            print(f"{number:4} {moment}")


if __name__ == "__main__":
    main()
