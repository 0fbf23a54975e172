"""Counts false alarms of StragglerMonitor and SpikeGuard on this machine, and how soon a slow rank is named.

First a job of two ranks trains for many steps on whatever else the machine does: nobody may be named, and no step be
skipped. Then, trial by trial, one rank of a job is made slow from a random step on, in computing or in reading data, by
some times what a step takes, drawn too: it must be named, alone, and in what it is slow.

Run: ``python tests/crash/slow_ranks.py [--steps 10000] [--trials 12] [--seed 0] [--layout dp2]``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from jobs import SIZES, Job, begin_rank, start
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.utils.data import Dataset

from lightning_megatron import GPTModule, MegatronStrategy, SpikeGuard, StragglerMonitor
from lightning_megatron.data import MegatronSampler, ResumableDataLoader
from lightning_megatron.testing.trainer import quiet_trainer

RANKS, BATCH = 2, 4
LAYOUTS: dict[str, dict[str, Any]] = {"dp2": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}}
SOON = 20
"""Steps after which a slow rank must be named."""


@dataclass(frozen=True)
class SlowJob(Job):
    """A training run in which a rank may become slow.

    Attributes:
        steps: steps of the run.
        slow: the rank; -1 for none.
        kind: kind of work that is slow.
        onset: first slow step.
        extra: seconds more, as a share of a usual step.
    """

    steps: int = 100
    slow: int = -1
    kind: str = "compute"
    onset: int = 0
    extra: float = 0.0

    def result(self, rank: int) -> Path:
        return self.folder.with_suffix(f".{rank}.json")


class Brake:
    """Makes every step slow from one on.

    Args:
        onset: that step.
        extra: share of a usual step.
    """

    def __init__(self, onset: int, extra: float) -> None:
        self.onset, self.extra = onset, extra
        self.moments: list[float] = []

    def __call__(self) -> None:
        if len(self.moments) < self.onset:
            self.moments.append(time.perf_counter())
        else:
            time.sleep(self.extra * median(b - a for a, b in pairwise(self.moments[-50:])))


class Module(GPTModule):
    """Brakes in its steps."""

    brake: Brake | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.brake is not None:
            self.brake()
        return super().training_step(batch, batch_idx)


class Texts(Dataset[dict[str, Tensor]]):
    """Random texts without an end.

    Args:
        brake: on the first text of a batch.
        batch_size: batch size of one rank.
    """

    def __init__(self, length: int, brake: Brake | None, batch_size: int) -> None:
        self.length, self.brake, self.batch_size, self.read = length, brake, batch_size, 0
        self.rows = torch.randint(32, (997, 9), generator=torch.Generator().manual_seed(2))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self.brake is not None and self.read % self.batch_size == 0:
            self.brake()
        self.read += 1
        text = self.rows[index % len(self.rows)]
        return {"tokens": text[:-1], "labels": text[1:]}


class Noted(StragglerMonitor):
    """Notes when it names a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.when: list[int] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        self.when += [trainer.global_step] * (len(self.found) - len(self.when))
        if trainer.global_step % 1000 == 0:
            print(f"step {trainer.global_step}", flush=True)


def work(job: SlowJob, rank: int, store: str) -> None:
    """One rank of a job."""
    limit = begin_rank(job, rank, RANKS, store)
    seed_everything(7, verbose=False)
    layout = LAYOUTS[job.layout]
    dp = 1 if layout else RANKS
    brake = Brake(job.onset, job.extra) if rank == job.slow else None
    module = Module("llama-tiny", lr=1e-4, **SIZES)
    module.brake = brake if job.kind == "compute" else None
    size = BATCH // dp
    data = Texts(job.steps * BATCH, brake if job.kind == "data" else None, size)
    batches = MegatronSampler(len(data), batch_size=size, dp_rank=rank if dp > 1 else 0, dp_size=dp)
    monitor, guard = Noted(), SpikeGuard()
    trainer = quiet_trainer(
        MegatronStrategy(**layout, timeout=limit),
        max_steps=job.steps,
        log_every_n_steps=1000,
        callbacks=[monitor, guard],
    )
    begun = time.monotonic()
    trainer.fit(module, ResumableDataLoader(data, batch_sampler=batches))
    seconds = time.monotonic() - begun
    found = [[s.rank, s.kind, s.share, when] for s, when in zip(monitor.found, monitor.when, strict=True)]
    result = {"found": found, "skipped": len(guard.skipped), "ms": 1e3 * seconds / job.steps}
    job.result(rank).write_text(json.dumps(result))
    os._exit(0)  # leaving a gloo group may hang


def outcome(job: SlowJob) -> dict[str, Any]:
    """Run a job; what its first rank found, which the other must have found, too."""
    processes = start(work, job, RANKS)
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * RANKS, job.output(0).read_text()[-3000:]
    found = [json.loads(job.result(rank).read_text()) for rank in range(RANKS)]
    assert found[0]["found"] == found[1]["found"]
    return found[0]


def run(
    steps: int, trials: int, seed: int, layout: str, scratch: Path, tell: Callable[[str], None] = print
) -> tuple[dict[str, Any], list[int]]:
    """The long run's outcome, and the steps after which each slow rank was named."""
    quiet = {"found": [], "skipped": 0, "ms": 0.0}
    if steps:
        quiet = outcome(SlowJob(scratch / "quiet", layout, steps=steps))
        tell(f"{layout}, {steps} steps of {quiet['ms']:.1f} ms: named {quiet['found']}, skipped {quiet['skipped']}")
    dice, delays = random.Random(seed), []
    for number in range(trials):
        onset, kind = dice.randrange(40, 60), dice.choice(("compute", "data"))
        slow, extra = dice.randrange(RANKS), dice.uniform(1.5, 4.0)
        name = list(LAYOUTS)[number % len(LAYOUTS)]
        job = SlowJob(scratch / str(number), name, steps=onset + 30, slow=slow, kind=kind, onset=onset, extra=extra)
        result = outcome(job)
        what = f"{number}: {name}, rank {slow} slow in {kind} by {extra:.0%} from step {onset}, {result['ms']:.1f} ms"
        named = [found for found in result["found"] if found[3] > onset]
        assert [found[:2] for found in named] == [[slow, kind]], (what, result)
        delays.append(named[0][3] - onset)
        tell(f"{what}: named after {delays[-1]} steps, {named[0][2]:.0%} of a step")
    return quiet, delays


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layout", choices=list(LAYOUTS), default="dp2")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        quiet, delays = run(options.steps, options.trials, options.seed, options.layout, Path(scratch))
    print(f"{len(quiet['found'])} false alarms and {quiet['skipped']} skipped steps in {options.steps}")
    if delays:
        print(f"{len(delays)} slow ranks named after {median(delays):.0f} steps (median), {max(delays)} at most")
    assert not quiet["found"]
    assert not quiet["skipped"]
    assert max(delays, default=0) <= SOON


if __name__ == "__main__":
    main()
