"""Sends signals to training jobs at random moments and resumes them; what comes out must be the run that nobody ended.

A trial is a job of two to four processes that train, validate and save; SIGTERM, SIGUSR1 or SIGINT goes to some ranks,
or to all of them, up to a second apart, at any time after the first step: in training, in validation, or while a
checkpoint is being saved. All ranks must end in time with 128 + the signal's number, with a checkpoint that passes
``verify``, from which ``ckpt_path="last"`` goes on, and every loss of both runs must be that of the uninterrupted run,
bit for bit.

Run: ``python tests/crash/signalling.py [--trials 60] [--seed 0] [--apart 1.0]``.
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
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_megatron import GPTModule, MegatronStrategy
from lightning_megatron.data import MegatronSampler, ResumableDataLoader
from lightning_megatron.testing.trainer import quiet_trainer

STEPS, EVERY = 400, 10
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2}),
    "dp3": (3, {}),
    "boring": (2, {}),
    "tp2-dp2": (4, {"tp": 2}),
}
"""Ranks and arguments of the strategy; the last are the slowest."""

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
IN_TIME = 30.0  # seconds, what Slurm and torchrun give a job by default


@dataclass(frozen=True)
class SignalledJob(Job):
    """A training run that gets signals, and is resumed.

    Attributes:
        save_last: argument of ``ModelCheckpoint``.
        stops_at: its last step.
    """

    save_last: Any = "link"
    stops_at: int = STEPS

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return LAYOUTS[self.layout][0]

    @property
    def validating(self) -> Path:
        return self.folder.with_suffix(".validating")


class Boring(BoringModel):
    """Logs what it trains on, and says when it validates."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.log("train_loss", output["loss"])
        return output


def _note_validation(module: Any, file: Path) -> None:
    """Let a module say when it validates, and take long enough to be hit there."""
    module.on_validation_batch_start = lambda *_: (file.touch(), time.sleep(0.01))
    module.on_validation_end = lambda: file.unlink(missing_ok=True)


def work(job: SignalledJob, rank: int, store: str) -> None:
    """One rank of a job."""
    ranks, layout = LAYOUTS[job.layout]
    limit = begin_rank(job, rank, ranks, store)
    seed_everything(7, verbose=False)
    saver = ModelCheckpoint(job.folder, filename="{step}", every_n_train_steps=EVERY, save_last=job.save_last)
    trainer = quiet_trainer(
        MegatronStrategy(**layout, async_save=job.in_background, timeout=limit),
        max_steps=job.stops_at,
        logger=Log(job.log),
        enable_checkpointing=True,
        use_distributed_sampler=False,
        val_check_interval=15,
        limit_val_batches=8,
        callbacks=[saver],
    )
    generator = torch.Generator().manual_seed(2)
    if job.layout == "boring":
        rows: list[Any] = list(torch.randn(STEPS * 6, 32, generator=generator))
        module: Any = Boring()
    else:
        tokens = torch.randint(32, (STEPS * 6, 9), generator=generator)
        rows = [{"tokens": t[:-1], "labels": t[1:]} for t in tokens]
        module = GPTModule("llama-tiny", lr=1e-2, hidden_dropout=0.1, attention_dropout=0.1, **SIZES)
    _note_validation(module, job.validating)
    replicas = ranks // layout.get("tp", 1)
    own = rows[rank // layout.get("tp", 1) :: replicas]
    batches = MegatronSampler(len(own), batch_size=len(own) // STEPS)
    loader = ResumableDataLoader(own, batch_sampler=batches)  # type: ignore[arg-type]
    held_out = torch.utils.data.DataLoader(own, batch_size=2)  # type: ignore[arg-type]
    code = 0
    try:
        trainer.fit(module, loader, held_out, ckpt_path="last" if job.resumes else None)
    except SystemExit as leave:
        code = int(leave.code or 0)
    handlers = [signal.getsignal(number) for number in SIGNALS]
    assert handlers == [signal.SIG_DFL, signal.SIG_DFL, signal.default_int_handler], handlers
    os._exit(code)  # leaving a gloo group may hang


def strike(
    job: SignalledJob, processes: list[BaseProcess], apart: float, dice: random.Random
) -> tuple[int, str, float]:
    """Send signals; the number that counts, when it was, and the seconds until all ranks had ended.

    Args:
        job: the job.
        processes: its ranks.
        apart: seconds within which signals reach two or more ranks, one after another; 0 for any ranks at once.
        dice: source of randomness.
    """
    after = dice.randrange(2, 60)
    wait_until(lambda: len(job.losses()) >= after, processes, 0.001)
    moment = dice.choice(("training", "validation", "a save"))
    if moment == "validation":
        wait_until(job.validating.exists, processes, 0.001)
        time.sleep(dice.uniform(0.0, 0.08))
    elif moment == "a save":
        wait_until(lambda: is_saving(job.folder), processes, 0.0)
    number = dice.choice(SIGNALS)
    victims = dice.sample(range(job.ranks), dice.randint(2 if apart else 1, job.ranks))
    begun = time.monotonic()
    for delay, rank in zip([0.0, *sorted(dice.uniform(0.0, apart) for _ in victims[1:])], victims, strict=True):
        time.sleep(max(0.0, begun + delay - time.monotonic()))
        pid = processes[rank].pid
        if pid is not None and processes[rank].is_alive():
            os.kill(pid, number)
    for process in processes:
        process.join(PATIENCE)
        assert not process.is_alive(), (job, moment, number, victims)
    how = f"{moment}, {len(victims)} of {job.ranks} ranks{' one after another' if apart else ''}"
    return number, how, time.monotonic() - begun


def trial(job: SignalledJob, whole: list[tuple[int, str]], apart: float, dice: random.Random) -> tuple[str, float]:
    """One job, ended and resumed; when it was hit, and how long it took to end.

    Raises:
        AssertionError: if anything is not as it should be.
    """
    processes = start(work, job, job.ranks)
    number, moment, seconds = strike(job, processes, apart, dice)
    losses = finish(job, processes, 128 + number)
    assert losses == whole[: len(losses)], (job, moment, len(losses))
    assert seconds < IN_TIME, (job, moment, seconds)
    assert not (found := faults(job.folder)), (job, moment, found)
    last = step_of(job.folder / "last.ckpt")
    assert {path.name for path in job.folder.iterdir()} == final_names(job.folder), "nothing unfinished, no dead link"
    assert last == len(losses), (
        job,
        moment,
        last,
        len(losses),
        "the state that is saved is the last one that was trained",
    )
    again = replace(job, resumes=True, stops_at=last + 25)
    resumed = finish(again, start(work, again, again.ranks))
    assert resumed == whole[last : last + 25], (job, moment, last, resumed[:3], whole[last : last + 3])
    shutil.rmtree(job.folder)
    return f"{signal.Signals(number).name} in {moment}", seconds


def run(
    trials: int, seed: int, scratch: Path, apart: float = 1.0, tell: Callable[[str], None] = print
) -> tuple[Counter[str], list[float]]:
    """All trials, one after another; how many were hit when, and how long each took to end."""
    dice = random.Random(seed)
    whole = {}
    for layout in list(LAYOUTS)[:trials]:
        job = SignalledJob(scratch / f"whole-{layout}", layout)
        whole[layout] = finish(job, start(work, job, job.ranks))
        assert [step for step, _ in whole[layout]] == list(range(STEPS))
    count: Counter[str] = Counter()
    times = []
    for number in range(trials):
        layout = list(LAYOUTS)[number % len(LAYOUTS)]
        job = SignalledJob(
            scratch / f"trial-{number}",
            layout,
            in_background=number // len(LAYOUTS) % 2 == 0,
            save_last="link" if number // len(LAYOUTS) % 3 else True,
        )
        spread = apart if (number + number // len(LAYOUTS)) % 2 else 0.0  # half of the trials of each layout
        moment, seconds = trial(job, whole[layout], spread, dice)
        count[moment] += 1
        times.append(seconds)
        tell(f"{number}: {layout}{', async' if job.in_background else ''}: {moment}; ended in {seconds:.1f} s, resumed")
    return count, times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--apart", type=float, default=1.0, help="seconds between the signals to two ranks, at most")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        count, times = run(options.trials, options.seed, Path(scratch), options.apart)
        for moment, number in sorted(count.items()):
            print(f"{number:4} {moment}")
        print(f"{len(times)} ended in {sorted(times)[len(times) // 2]:.2f} s (median), {max(times):.2f} s at most")


if __name__ == "__main__":
    main()
