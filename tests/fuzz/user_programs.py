"""Random ordinary Lightning programs: ours does what stock Lightning does, or refuses by name before the first step.

    python tests/fuzz/user_programs.py 2000                        # so many seeds
    python tests/fuzz/user_programs.py 100 --first 5000 --layout dp2 --with metric=module
    python tests/fuzz/user_programs.py 100 --known                 # features that fail today, too
    python tests/fuzz/user_programs.py --program "net=conv teacher seed=3 @dp2"

A program is drawn from the grammar in ``user_grammar.py``. It runs under stock Lightning, in one process or in DDP on
two ranks, and under ``MegatronStrategy`` with its defaults in the program's layout. Samples, losses, logged values,
rates, what callbacks saw, buffers, weights, optimizer state and checkpoints must be equal. A number of another layout
may differ as much as stock Lightning's own number does when weights are moved in their last places. In ``bf16-mixed``
each backward rounds its gradient to bf16: with micro-batches, ours may be equal to stock Lightning with a backward of
each micro-batch. A program that fails loses feature after feature while it still fails in the same way, and is printed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from user_comparison import Difference, beyond_rounding, differences, in_both
from user_grammar import KNOWN, LAYOUTS, SENSELESS, Program, broken, drawn
from user_runs import RANKS, Outcome, joined, run

from lightning_megatron.testing.workers import WorkerError, WorkerPool, WorkerTimeoutError

Ranks = Callable[..., list[Outcome]]
MOVED = 2
"""Runs of stock Lightning with weights moved in their last places, which tell roundings from faults."""


@dataclass(frozen=True)
class Answer:
    """What came of a program.

    Attributes:
        kind: ``"equal"``, ``"refused"``, ``"no program"`` (stock Lightning fails) or ``"fault"``.
        differences: those of a fault.
        text: error of stock Lightning, or of the refusal.
    """

    kind: str
    differences: Sequence[Difference] = ()
    text: str = ""

    @property
    def subjects(self) -> frozenset[str]:
        """Kinds of the differences."""
        return frozenset(each.subject for each in self.differences)


def answer_of(program: Program, folder: Path, ranks: Ranks) -> Answer:
    """Run a program in its layout, and compare.

    Args:
        program: the program.
        folder: a folder for its files.
        ranks: runs a function on so many ranks.
    """
    home = Path(tempfile.mkdtemp(dir=folder))
    try:
        stock = _stock(program, home / "stock", ranks)
        broke = [outcome.error for outcome in stock if outcome.error]
        if broke:
            return Answer("no program", text=broke[0][1])
        ours = _parts(program, home / "ours", ranks, ours=True)
        found = differences(program, stock, ours)
        if found and program["precision"] == "bf16-mixed" and program.layout == "mb2":
            found = in_both(found, differences(program, _stock(program, home / "halves", ranks, halves=True), ours))
        for seed in range(MOVED) if found and not program.alone else ():
            moved = _stock(program, home / f"moved{seed}", ranks, moved=seed)
            found = beyond_rounding(program, found, stock, moved)
    except (WorkerError, WorkerTimeoutError) as error:
        return Answer("fault", [Difference(type(error).__name__, "", "", str(error)[-600:])])
    finally:
        shutil.rmtree(home, ignore_errors=True)
    if found:
        return Answer("fault", found)
    refused = [outcome.error for outcome in ours if outcome.error]
    return Answer("refused", text=refused[0][1]) if refused else Answer("equal")


def _stock(program: Program, home: Path, ranks: Ranks, **how: Any) -> list[Outcome]:
    """Lightning's outcomes: of two replicas, or of one process."""
    program = program if program.layout.startswith("dp2") else program.at("one")
    return _on(program, home, ranks, "whole", **how)


def _parts(program: Program, home: Path, ranks: Ranks, **how: Any) -> list[Outcome]:
    """Outcomes of a program that stops and goes on, perhaps in another layout; or just runs."""
    if program["stop"] == "none":
        return _on(program, home, ranks, "whole", **how)
    first = _on(program, home, ranks, "first", **how)
    if any(outcome.error or not outcome.stopped for outcome in first):
        return first
    (home / "stop").unlink(missing_ok=True)
    after = program if program["resume"] == "same" else program.at(program["resume"])
    second = _on(after, home, ranks, "second", **how)
    alike = len(first) == len(second)
    return [joined(first[rank if alike else -1], outcome) for rank, outcome in enumerate(second)]


def _on(program: Program, home: Path, ranks: Ranks, part: str, **how: Any) -> list[Outcome]:
    """Outcomes of the ranks of a layout; ``how`` as in ``run``."""
    if program.layout not in RANKS:
        return [run(program, home, part, **how)]
    return ranks(RANKS[program.layout], run, program, home, part, **how)


def shrunk(program: Program, answer: Answer, attempt: Callable[[Program], Answer]) -> tuple[Program, Answer]:
    """The program with as few features as still fail, in one of the same subjects.

    Args:
        program: the program.
        answer: its fault.
        attempt: runs a program.
    """
    for feature in reversed(program.features):
        less = program.without(feature)
        if next(broken(less, SENSELESS), None) is not None:
            continue
        found = attempt(less)
        if found.kind == "fault" and found.subjects & answer.subjects:
            return shrunk(less, found, attempt)
    return program, answer


def described(program: Program, answer: Answer) -> str:
    """A short description of a fault."""
    names = sorted({rule.why for rule in broken(program, KNOWN)})
    shown = [str(each) for each in answer.differences[:6]]
    more = len(answer.differences) - len(shown)
    lines = [
        f"FAULT{f' (known: {names})' if names else ''}  {program}",
        *shown,
        *([f"and {more} more"] if more else []),
    ]
    return "\n    ".join(lines)


class Trial:
    """Tries programs, and counts them by feature and layout."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self.folder, self.ranks = folder, ranks
        self.kinds, self.words, self.layouts = Counter[str](), Counter[str](), Counter[str]()
        self.texts = Counter[str]()

    def __call__(self, program: Program) -> Answer:
        answer = self._attempt(program)
        self.kinds[answer.kind] += 1
        self.layouts[f"{program.layout}: {answer.kind}"] += 1
        if answer.kind in ("equal", "fault"):
            self.words.update(program.features or ("nothing",))
        if answer.text:
            self.texts[f"{answer.kind}: {answer.text[:300]}"] += 1
        if answer.kind == "fault":
            print(described(*shrunk(program, answer, self._attempt)), flush=True)
        return answer

    def _attempt(self, program: Program) -> Answer:
        return answer_of(program, self.folder, self.ranks)

    def summary(self) -> str:
        """Counts of all."""
        parts = {"programs": self.kinds, "layouts": self.layouts, "features": self.words, "texts": self.texts}
        return "\n".join(
            f"{name}: " + ", ".join(f"{key} {n}" for key, n in sorted(counts.items())) for name, counts in parts.items()
        )


def main(words: Sequence[str] | None = None) -> int:
    """Try programs; the status is 1 if there was a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", nargs="?", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--layout", choices=LAYOUTS)
    parser.add_argument("--every-layout", action="store_true", help="each program in all layouts that it has")
    parser.add_argument("--with", dest="given", nargs="*", default=[], metavar="FEATURE")
    parser.add_argument("--known", action="store_true", help="do not avoid what is known to fail")
    parser.add_argument("--program", action="append", default=[], help="a program as it is printed")
    given = parser.parse_args(words)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    torch.set_num_threads(1)
    seeds = [] if given.program else range(given.first, given.first + given.count)
    programs = [drawn(seed, given.layout, known=given.known, given=given.given) for seed in seeds]
    if given.every_layout:
        table = SENSELESS if given.known else (*SENSELESS, *KNOWN)
        places = [program.at(layout) for program in programs for layout in LAYOUTS]
        programs = [program for program in places if next(broken(program, table), None) is None]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, WorkerPool(size=2, timeout=60.0) as pool:
        trial = Trial(Path(folder), pool.run)
        with suppress(KeyboardInterrupt):  # what has been counted is shown
            for program in [*map(Program.parse, given.program), *programs]:
                trial(program)
    print(trial.summary())
    print(f"{time.monotonic() - began:.0f} s")
    return int(trial.kinds["fault"] > 0)


if __name__ == "__main__":
    sys.exit(main())
