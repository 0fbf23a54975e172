"""Sends signals to training jobs at random moments and resumes them; what comes out must be the run that nobody ended.

A trial is a job of two processes that train, validate and save; SIGTERM, SIGUSR1 or SIGINT goes to one rank, or to
both, up to a second apart, at any time after the first step: in training, in validation, or while a checkpoint is being
saved. All ranks must end in time with 128 + the signal's number, with a checkpoint that passes ``verify``, from which
``ckpt_path="last"`` goes on, and every loss of both runs must be that of the uninterrupted run, bit for bit.

Run: ``python tests/crash/signalling.py [--trials 60] [--seed 0] [--apart 1.0]``.
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
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from killing import PATIENCE, SIZES, Log, faults, is_saving, step_of, wait_until
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_megatron import GPTModule, MegatronStrategy
from lightning_megatron.data import MegatronSampler, ResumableDataLoader
from lightning_megatron.testing.trainer import quiet_trainer
from lightning_megatron.testing.workers import PRELOAD

RANKS, STEPS, EVERY = 2, 400, 10
LAYOUTS: dict[str, dict[str, Any]] = {"tp2": {"tp": 2}, "dp2": {}, "boring": {}}
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
IN_TIME = 30.0  # seconds, what Slurm and torchrun give a job by default


@dataclass(frozen=True)
class Job:
    """A training run.

    Attributes:
        folder: of its checkpoints; its log lies beside it.
        layout: a key of ``LAYOUTS``.
        in_background: ``async_save``.
        resumes: whether it goes on from the last checkpoint.
        stops_at: its last step.
    """

    folder: Path
    layout: str
    in_background: bool = False
    resumes: bool = False
    stops_at: int = STEPS

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".resumed" if self.resumes else ".log")

    @property
    def validating(self) -> Path:
        return self.folder.with_suffix(".validating")

    def losses(self) -> list[tuple[int, str]]:
        """Step and loss, as far as whole lines were written."""
        if not self.log.exists():
            return []
        lines = self.log.read_text().splitlines(keepends=True)
        pairs = [line.split() for line in lines if line.endswith("\n")]
        return [(int(step), loss) for step, loss in pairs]


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


def work(job: Job, rank: int, store: str) -> None:
    """One rank of a job."""
    output = os.open(job.folder.with_suffix(f".{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    torch.set_num_threads(1)
    limit = timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=limit)
    seed_everything(7, verbose=False)
    saver = ModelCheckpoint(
        job.folder, filename="{step}", every_n_train_steps=EVERY, save_last=True if job.in_background else "link"
    )
    trainer = quiet_trainer(
        MegatronStrategy(**LAYOUTS[job.layout], async_save=job.in_background, timeout=limit),
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
        rows: list[Any] = list(torch.randn(STEPS * 2, 32, generator=generator))
        module: Any = Boring()
    else:
        tokens = torch.randint(32, (STEPS * 2, 9), generator=generator)
        rows = [{"tokens": t[:-1], "labels": t[1:]} for t in tokens]
        module = GPTModule("llama-tiny", lr=1e-2, hidden_dropout=0.1, attention_dropout=0.1, **SIZES)
    _note_validation(module, job.validating)
    own = rows if job.layout == "tp2" else rows[rank::2]
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


def finish(job: Job, processes: list[BaseProcess], code: int = 0) -> list[tuple[int, str]]:
    """Wait for all ranks; what they logged."""
    for process in processes:
        process.join(PATIENCE)
    codes = [process.exitcode for process in processes]
    assert codes == [code] * RANKS, (job, codes, job.folder.with_suffix(".0").read_text()[-3000:])
    return job.losses()


def strike(job: Job, processes: list[BaseProcess], apart: float, dice: random.Random) -> tuple[int, str, float]:
    """Send signals; the number that counts, when it was, and the seconds until all ranks had ended."""
    after = dice.randrange(2, 60)
    wait_until(lambda: len(job.losses()) >= after, processes, 0.001)
    moment = dice.choice(("training", "validation", "a save"))
    if moment == "validation":
        wait_until(job.validating.exists, processes, 0.001)
        time.sleep(dice.uniform(0.0, 0.08))
    elif moment == "a save":
        wait_until(lambda: is_saving(job.folder), processes, 0.0)
    number = dice.choice(SIGNALS)
    victims = dice.choice(([0], [1], [0, 1], [1, 0]))
    for turn, rank in enumerate(victims):
        if turn:
            time.sleep(dice.choice((0.0, dice.uniform(0.0, apart))))
        pid = processes[rank].pid
        if pid is not None and processes[rank].is_alive():
            os.kill(pid, number)
        if not turn:
            begun = time.monotonic()
    for process in processes:
        process.join(PATIENCE)
        assert not process.is_alive(), (job, moment, number, victims)
    return number, f"{moment}, {'one rank' if len(victims) == 1 else 'both'}", time.monotonic() - begun


def trial(job: Job, whole: list[tuple[int, str]], apart: float, dice: random.Random) -> tuple[str, float]:
    """One job, ended and resumed; when it was hit, and how long it took to end.

    Raises:
        AssertionError: if anything is not as it should be.
    """
    processes = start(job)
    number, moment, seconds = strike(job, processes, apart, dice)
    losses = finish(job, processes, 128 + number)
    assert losses == whole[: len(losses)], (job, moment, len(losses))
    assert seconds < IN_TIME, (job, moment, seconds)
    assert not (found := faults(job.folder)), (job, moment, found)
    last = step_of(job.folder / "last.ckpt")
    assert last == len(losses), (
        job,
        moment,
        last,
        len(losses),
        "the state that is saved is the last one that was trained",
    )
    again = replace(job, resumes=True, stops_at=last + 25)
    resumed = finish(again, start(again))
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
        job = Job(scratch / f"whole-{layout}", layout)
        whole[layout] = finish(job, start(job))
        assert [step for step, _ in whole[layout]] == list(range(STEPS))
    count: Counter[str] = Counter()
    times = []
    for number in range(trials):
        layout = list(LAYOUTS)[number % len(LAYOUTS)]
        job = Job(scratch / f"trial-{number}", layout, in_background=number // 3 % 2 == 1)
        moment, seconds = trial(job, whole[layout], apart, dice)
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
