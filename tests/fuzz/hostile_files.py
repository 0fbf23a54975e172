"""Gives hostile files to everything that reads files; nothing in them may run, and each must be refused by name.

Every case is a copy of sound files with one of them spoiled, every reader a process of its own. It must end in one of
our errors with the name of the file in it (or, where nothing in the file is wrong for that reader, without one), with
at most 1 GiB of memory more and in 30 s of processor time; and a file that the payloads touch must not come into being.

Run: ``python tests/fuzz/hostile_files.py [--trials N] [--seed 0] [--kind NAME] [--verbose]``; without ``--trials`` all
of them.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing as mp
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import hostile_payloads as payloads
from hostile_case import Case
from hostile_cases import all_cases
from hostile_readers import BESIDE, Reader, RefusedError, fit_data, readers_of
from hostile_sources import build

from lightning_megatron.testing.workers import PRELOAD

WALL, CPU, MEMORY = 180.0, 30, payloads.GIB


@dataclass(frozen=True)
class Outcome:
    """Outcome of a case with one reader.

    Attributes:
        answer: ``refused``, ``taken``, or what is wrong.
        text: text of the error.
        memory: bytes more than before, at most.
        seconds: processor time in seconds.
    """

    answer: str
    text: str = ""
    memory: int = 0
    seconds: float = 0.0

    @property
    def is_fine(self) -> bool:
        return self.answer in ("refused", "taken")


def _peak() -> int:
    """The most memory that this process has had, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise AssertionError


def _attempt(case: Tagged, homes: dict[str, Path], answers: Connection) -> None:
    """Life of a process: the readers of one case, one after another."""
    import torch

    os.setsid()
    torch.set_num_threads(1)
    first = next(iter(homes.values()))
    log = os.open(first.parent / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 3 * payloads.GIB, size + 3 * payloads.GIB))
    for reader, home in homes.items():
        sys.path.insert(0, str(home))
        os.chdir(home)
        begun, before = _seconds(), _peak()
        resource.setrlimit(resource.RLIMIT_CPU, (int(begun) + 2 * CPU, resource.RLIM_INFINITY))
        answer, text = _answer(readers_of(case)[reader], home)
        sys.path.remove(str(home))
        answers.send((answer, text[-4000:] if answer.startswith("raw") else text[:4000], _peak() - before,
                      _seconds() - begun))  # fmt: skip
    answers.close()
    os._exit(0)


def _answer(read: Reader, home: Path) -> tuple[str, str]:
    from lightning_megatron.checkpoint import CheckpointError
    from lightning_megatron.data import DataError
    from lightning_megatron.errors import ConfigError

    try:
        read(home)
    except (RefusedError, ConfigError, DataError, CheckpointError) as error:
        return "refused", str(error)
    except BaseException as error:
        return f"raw {type(error).__name__}", traceback.format_exc()
    return "taken", ""


def _seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def judged(case: Case, reader: str, outcome: Outcome, ran: bool) -> Outcome:
    """The outcome, with what is wrong about it."""
    answer = outcome.answer
    names = (case.errs_with or Path(case.file).name).split("|")
    if ran:
        answer = "EXECUTED"
    elif outcome.memory > MEMORY:
        answer = f"{outcome.memory / payloads.GIB:.1f} GiB"
    elif outcome.seconds > CPU:
        answer = f"{outcome.seconds:.0f} s"
    elif answer == "refused" and not any(name in outcome.text for name in (*names, Path(case.file).name)):
        answer = "does not name the file"
    elif answer == "taken" and not case.harmless and not _passes_over(case, reader):
        answer = "taken, and is harmful"
    return Outcome(answer, outcome.text, outcome.memory, outcome.seconds)


def _passes_over(case: Case, reader: str) -> bool:
    """True if a reader need not see the fault: another checkpoint is there, or it makes nothing of what it hashes."""
    return reader == "fit, last" or (reader.startswith("verify") and case.errs_with == "last.ckpt")


def attempt(case: Case, homes: dict[str, Path], mark: Path, context: Any) -> dict[str, Outcome]:
    """Give spoiled copies of sound files to their readers; another process goes on where one has died."""
    outcomes: dict[str, Outcome] = {}
    while left := {reader: home for reader, home in homes.items() if reader not in outcomes}:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_attempt, args=(Tagged.of(case), left, theirs))
        process.start()
        theirs.close()
        for reader in left:
            outcome = Outcome("no end")
            is_there = ours.poll(WALL)
            if is_there:
                try:
                    outcome = Outcome(*ours.recv())
                except EOFError:
                    is_there = False
                    process.join(10)
                    text = (scratch_of(homes) / "log").read_text(errors="replace")[-2000:]
                    outcome = Outcome(f"exit code {process.exitcode}", text)
            ran = mark.exists()
            mark.unlink(missing_ok=True)
            outcomes[reader] = judged(case, reader, outcome, ran)
            if not is_there:
                break
        process.join(1)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, 9)  # and what it has started
        process.join()
    return outcomes


def scratch_of(homes: dict[str, Path]) -> Path:
    return next(iter(homes.values())).parent


def prepare(case: Case, sound: Path, home: Path, mark: Path) -> None:
    """Copy what the case needs, and spoil it."""
    home.mkdir(parents=True)
    for name in (case.source, *BESIDE.get(case.source, ())):
        shutil.copytree(sound / name, home / name)
    (home / "evil_import.py").write_text(f"open({str(mark)!r}, 'w')\nclass Thing: pass\n")
    if case.kind == "index cache":
        shutil.copytree(sound / "cached", home / "data", dirs_exist_ok=True)
    case.spoil(home / case.source / case.file)


def run(
    scratch: Path, *, trials: int | None = None, seed: int = 0, kind: str = "", tell: Callable[[str], None] = print,
    cases: Sequence[Case] | None = None,
) -> dict[tuple[str, str, str], Outcome]:  # fmt: skip
    """Every case with every reader, or some pairs drawn at random.

    Returns:
        The outcome by kind, trick and reader.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, "lightning_megatron.tools.cli.training.trainer",
                                    "lightning_megatron.tools.cli.inference.continuation",
                                    "hostile_cases", "hostile_sources"])  # fmt: skip
    sound, mark = scratch / "sound", scratch / "mark"
    sound.mkdir()
    maker = context.Process(target=_make_sound, args=(sound,))
    maker.start()
    maker.join()
    assert maker.exitcode == 0
    found = [case for case in (cases or all_cases(mark)) if kind in case.kind]
    pairs = [(case, reader) for case in found for reader in readers_of(case)]
    if trials is not None:
        chosen = set(random.Random(seed).sample(range(len(pairs)), min(trials, len(pairs))))
        pairs = [pair for number, pair in enumerate(pairs) if number in chosen]
    outcomes: dict[tuple[str, str, str], Outcome] = {}
    for case, group in groupby(pairs, key=lambda pair: pair[0]):
        homes = {reader: scratch / "homes" / str(number) for number, (_, reader) in enumerate(group)}
        for home in homes.values():
            prepare(case, sound, home, mark)
        for reader, outcome in attempt(case, homes, mark, context).items():
            outcomes[case.kind, case.name, reader] = outcome
            if not outcome.is_fine:
                tell(f"{case.kind} | {case.name} | {reader}: {outcome.answer}\n{_indented(outcome.text)}")
        shutil.rmtree(scratch / "homes")
    return outcomes


@dataclass(frozen=True)
class Tagged:
    """Part of a case that the process of a reader needs; the rest cannot be pickled."""

    kind: str
    source: str
    file: str
    errs_with: str

    @classmethod
    def of(cls, case: Case) -> Any:
        return cls(case.kind, case.source, case.file, case.errs_with)


def _make_sound(home: Path) -> None:
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "checkpoint" / "formats"))
    os.umask(0o027)
    build(home)
    shutil.copytree(home / "data", home / "cached")
    copy = home / "for-cache"
    copy.mkdir()
    shutil.copytree(home / "data", copy / "data")
    fit_data(copy)
    shutil.copytree(copy / "data", home / "cached", dirs_exist_ok=True)
    os._exit(0)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.strip().splitlines()[-14:])


def table(outcomes: dict[tuple[str, str, str], Outcome]) -> str:
    """One line a kind of file."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    tricks: dict[str, set[str]] = defaultdict(set)
    for (kind, name, _), outcome in outcomes.items():
        counts[kind][outcome.answer if outcome.is_fine else "faults"] += 1
        tricks[kind].add(name)
    lines = [
        "| kind of file | files | with readers | refused by name | taken, harmless | faults |",
        "|---|---|---|---|---|---|",
    ]
    for kind, count in counts.items():
        numbers = (len(tricks[kind]), sum(count.values()), count["refused"], count["taken"], count["faults"])
        lines.append(f"| {kind} | " + " | ".join(map(str, numbers)) + " |")
    whole = sum(counts.values(), Counter())
    numbers = (sum(map(len, tricks.values())), sum(whole.values()), whole["refused"], whole["taken"], whole["faults"])
    return "\n".join([*lines, "| all | " + " | ".join(map(str, numbers)) + " |"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--trials", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", default="")
    options = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        outcomes = run(Path(scratch), trials=options.trials, seed=options.seed, kind=options.kind)
    print(table(outcomes))
    print(f"{time.monotonic() - begun:.0f} s; most memory: {max(o.memory for o in outcomes.values()) >> 20} MiB")
    sys.exit(any(not outcome.is_fine for outcome in outcomes.values()))


if __name__ == "__main__":
    main()
