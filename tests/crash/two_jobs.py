"""Starts two jobs at once that save in one folder: one has it, the other is refused by name, or waits and goes on.

A trial is a pair of jobs of two processes each, up to two seconds apart. A job that begins anew is refused before its
first step if the other one is there, and its error names the other's process. One that goes on from ``"last"`` waits
for the other to end. Every loss of either is that of a run alone, and everything with a final name passes ``verify``.

Run: ``python tests/crash/two_jobs.py [--trials 100] [--seed 0]``.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jobs import PATIENCE, Losses, faults, final_names, start
from killing import LAYOUTS, RANKS, KilledJob, alone, work


@dataclass(frozen=True)
class PairedJob(KilledJob):
    """A job of a pair.

    Attributes:
        name: which of them.
    """

    name: str = ""

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(f".{self.name}.log")

    def output(self, rank: int) -> Path:
        return self.folder.with_suffix(f".{self.name}.{rank}")


def trial(pair: tuple[PairedJob, PairedJob], whole: Losses, apart: float) -> str:
    """One pair; what became of it.

    Raises:
        AssertionError: if anything is not as it should be.
    """
    folder, started = pair[0].folder, []
    for job in pair:
        started.append(start(work, job, RANKS))
        time.sleep(apart if job is pair[0] else 0.0)
    for processes in started:
        for process in processes:
            process.join(PATIENCE)
    ends = []
    for job, processes, others in zip(pair, started, started[::-1], strict=True):
        codes, printed = [process.exitcode for process in processes], job.output(0).read_text()
        losses = job.losses()
        if codes == [0] * RANKS:
            assert losses in (whole, []), (job, losses)
            ends.append("waited" if "waiting up to" in printed else "trained")
            refused = f"process {others[0].pid} on " in printed and "in use" in printed
            assert not refused, (job, printed[-3000:])
            continue
        assert not losses, (job, "before the first step")
        if "has been saved since" in printed:  # the other came and went between its look and its start
            ends.append("told to start again")
            continue
        for rank in range(RANKS):
            text = job.output(rank).read_text()
            assert f"process {others[0].pid} on " in text, (job, rank, codes, text[-3000:])
            assert f"{folder} is in use" in text, (job, rank, text[-3000:])
        ends.append("refused")
    assert "trained" in ends, (pair, ends)
    assert not (found := faults(folder)), (pair, found)
    assert {path.name for path in folder.iterdir()} == final_names(folder), "nothing unfinished, no dead link"
    shutil.rmtree(folder)
    return ", ".join(sorted(ends))


def run(trials: int, seed: int, scratch: Path, tell: Callable[[str], None] = print) -> Counter[str]:
    """All trials, one after another; what became of how many."""
    dice = random.Random(seed)
    whole: dict[str, Losses] = {}
    count: Counter[str] = Counter()
    for number in range(trials):
        layout = list(LAYOUTS)[number % len(LAYOUTS)]
        if layout not in whole:
            whole[layout] = alone(layout, scratch)
        folder, save_last = scratch / f"trial-{number}", dice.choice(("link", True))
        in_background, resumes = number % 2 == 0, dice.random() < 0.4
        first, second = (PairedJob(folder, layout, in_background, resumes, save_last, name=name) for name in "ab")
        end = trial((first, second), whole[layout], dice.choice((0.0, 0.0, dice.uniform(0.0, 2.0))))
        count[end] += 1
        tell(f"{number}: {layout}{', async' if in_background else ''}{', last' if resumes else ''}: {end}")
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for end, number in sorted(run(options.trials, options.seed, Path(scratch)).items()):
            print(f"{number:4} {end}")


if __name__ == "__main__":
    main()
