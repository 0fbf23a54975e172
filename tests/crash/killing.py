"""Kills training jobs at random moments and resumes them; what comes out must be the run that nobody killed.

A trial is a job of two processes, dropout on, of which one or both get SIGKILL: half of the trials at any time, half
while a checkpoint is being saved, seen by its temporary directory. Then ``ckpt_path="last"`` must go on from the newest
checkpoint that was complete, every loss of either run must be that of the uninterrupted run, bit for bit, everything
that has a final name must pass ``verify``, right after the kill and at the end, and nothing else may be left.

Run: ``python tests/crash/killing.py [--trials 60] [--seed 0] [--one-file]``: half of the trials with ``async_save``.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from jobs import (
    PATIENCE,
    SIZES,
    Job,
    Log,
    Losses,
    begin_rank,
    faults,
    final_names,
    finish,
    is_saving,
    start,
    step_of,
    wait_until,
)
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron import GPTModule, MegatronStrategy
from lightning_megatron.data import MegatronSampler, ResumableDataLoader
from lightning_megatron.testing.trainer import quiet_trainer

RANKS, STEPS, EVERY = 2, 24, 3
LAYOUTS: dict[str, dict[str, Any]] = {"tp2": {"tp": 2}, "dp2": {}, "pp2": {"pp": 2, "micro_batch_size": 2}}


@dataclass(frozen=True)
class KilledJob(Job):
    """A training run that is killed, and resumed.

    Attributes:
        save_last: argument of ``ModelCheckpoint``.
        one_file: True for checkpoints that are single files.
    """

    save_last: Any = "link"
    one_file: bool = False


def work(job: KilledJob, rank: int, store: str) -> None:
    """One rank of a job."""
    limit = begin_rank(job, rank, RANKS, store)
    seed_everything(7, verbose=False)
    saver = ModelCheckpoint(job.folder, filename="{step}", every_n_train_steps=EVERY, save_last=job.save_last)
    how: dict[str, Any] = {"async_save": job.in_background, "save_distributed_checkpoint": not job.one_file}
    trainer = quiet_trainer(
        MegatronStrategy(**LAYOUTS[job.layout], **how, timeout=limit),
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


def strike(job: KilledJob, processes: list[BaseProcess], aims: bool, dice: random.Random) -> str:
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


def trial(job: KilledJob, whole: list[tuple[int, str]], aims: bool, dice: random.Random) -> str:
    """One job, killed and resumed; when it was hit.

    Raises:
        AssertionError: if anything is not as it should be.
    """
    processes = start(work, job, RANKS)
    moment = strike(job, processes, aims, dice)
    assert not (found := faults(job.folder)), (job, moment, found)
    losses = job.losses()
    assert losses == whole[: len(losses)], (job, moment, losses)
    steps = {name: step_of(job.folder / name) for name in final_names(job.folder)}
    newest = max(steps.values(), default=0)  # `last.ckpt` may be the one before: it is saved, or linked, after this one
    again = replace(job, resumes=True)
    resumed = finish(again, start(work, again, RANKS))
    assert resumed == whole[newest:], (job, moment, steps, resumed)
    assert not (found := faults(job.folder)), (job, moment, found)
    assert {path.name for path in job.folder.iterdir()} == final_names(job.folder), "nothing unfinished, no dead link"
    # A state saved before the first link was made does not know of it: Lightning then makes `last-v1.ckpt` beside it.
    # A run that had saved its last step takes none, and saves nothing: `last.ckpt` stays the one before.
    last = max(map(step_of, job.folder.glob("last*.ckpt")))
    assert last == STEPS or (newest == STEPS and last == steps["last.ckpt"]), (job, moment, steps, last)
    shutil.rmtree(job.folder)
    return moment


def alone(layout: str, scratch: Path) -> Losses:
    """Losses of a run that nobody disturbs."""
    job = KilledJob(scratch / f"whole-{layout}", layout)
    losses = finish(job, start(work, job, RANKS))
    assert [step for step, _ in losses] == list(range(STEPS))
    return losses


def run(
    trials: int, seed: int, scratch: Path, tell: Callable[[str], None] = print, *, one_file: bool = False
) -> Counter[str]:
    """All trials, one after another; how many were hit when."""
    dice = random.Random(seed)
    whole: dict[str, Losses] = {}
    count: Counter[str] = Counter()
    for number in range(trials):
        layout = list(LAYOUTS)[number // 4 % len(LAYOUTS)]
        if layout not in whole:
            whole[layout] = alone(layout, scratch)
        job = KilledJob(
            scratch / f"trial-{number}",
            layout,
            in_background=number % 2 == 0,
            save_last=dice.choice(("link", True)),
            one_file=one_file,
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
    parser.add_argument("--one-file", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = run(options.trials, options.seed, Path(scratch), one_file=options.one_file)
        for moment, number in sorted(found.items()):
            print(f"{number:4} {moment}")


if __name__ == "__main__":
    main()
