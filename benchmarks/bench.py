"""Trains ours and its peers in turns on the same weights and tokens, and compares their medians.

    python benchmarks/bench.py                                  # a short comparison: one process, all peers
    python benchmarks/bench.py --rows all --rounds 6 --resume   # every row for CPUs; resumes after an interruption
    python benchmarks/bench.py --rows all --minutes 20          # fewer rounds of slow rows, as the time allows
    python benchmarks/bench.py --rows llama-tiny/bf16/tp2       # one row, with all its peers
    python benchmarks/bench.py --peers --checkout ../before     # another checkout of ours, such as one before a change
    python benchmarks/bench.py --accelerator cuda --rows gpu1   # rows for one card; gpu8 for eight
    python benchmarks/bench.py --plan --rows gpu                # contestants and memory by arithmetic, nothing runs

A row is a model, a precision and a layout (``sizes.py``). Peers are installed from the package registry into
environments of their own (``.bench/envs``), with the torch of this environment. On a CPU contestants take turns, a
round of steps each, so that a busy machine slows all alike: quote the ratios, which are medians over rounds, and no
absolute figure. On a device, whose memory they cannot share, one follows the other. All contestants of a row begin with
the same Hugging Face weights; losses that do not agree are listed below the table. A peer that fails or cannot train a
row is listed there too, and the others continue.

Written under ``--out`` after every row: ``rounds.jsonl`` with every round, ``table.md`` and ``chart.png`` (with
matplotlib) from all rows in it. ``results.py`` makes a page for the repository from ``rounds.jsonl``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import results
import torch
from contestant import Contestant, ContestantError
from environments import HERE, PEERS, ROOT, python_of, versions_of, weights_of
from peers.protocol import Job
from results import Contest
from sizes import GROUPS, SHORT, card_memory, job_of_row, rows_of, size_of

Begin = Callable[[], Contestant]
FEWEST_ROUNDS = 3
"""Rounds of a row whose time is over, the first one included."""


@dataclass(frozen=True)
class Entry:
    """A contestant of a row that can be started.

    Attributes:
        name: name in tables.
        begin: function that starts it.
    """

    name: str
    begin: Begin


def start(name: str, job: Job, folder: Path, checkout: Path = ROOT, *, shown: str | None = None) -> Contestant:
    """A contestant that waits for its first round.

    Args:
        name: key of ``PEERS``.
        job: the training.
        folder: folder of the environments.
        checkout: checkout of ours to import, if this is ours.
        shown: name in tables, if it is another one.
    """
    peer = PEERS[name]
    paths = [str(HERE), *([str(checkout)] if name == "ours" else [])]
    threads = str(max(1, (os.cpu_count() or 1) // job.devices))
    environment = {"OMP_NUM_THREADS": threads, "PYTHONPATH": os.pathsep.join(paths)}
    command = [str(python_of(peer.environment, folder)), "-m", f"peers.{peer.module}", *job.words()]
    return Contestant(shown or name, command, environment)


def entries_of(
    row: str, job: Job, folder: Path, peers: Sequence[str] | None, checkouts: Sequence[Path]
) -> tuple[list[Entry], list[str]]:
    """Contestants of a row, ours first, and sentences about those that cannot train it.

    For a context-parallel layout, ours also trains with tensor parallelism of the same size, since no peer here has
    context parallelism.

    Args:
        row: name of the row.
        job: its training.
        folder: folder of the environments.
        peers: names of wanted contestants besides ours; ``None`` for all.
        checkouts: other checkouts of ours.
    """
    model = row.split("/")[0]
    entries, left_out = [], []
    for name, peer in PEERS.items():
        if name != "ours" and peers is not None and name not in peers:
            continue
        reason = peer.unable(model, job)
        if reason is None:
            entries.append(Entry(name, partial(start, name, job, folder)))
        else:
            left_out.append(f"{name}: left out: {reason}")
    if "cp" in job.axes:
        other = job.layout.replace("cp", "tp")
        shown = f"ours, {other}"
        entries.append(Entry(shown, partial(start, "ours", replace(job, layout=other), folder, shown=shown)))
    for path in checkouts:
        shown = f"ours in {path.resolve().name}"
        entries.append(Entry(shown, partial(start, "ours", job, folder, path.resolve(), shown=shown)))
    return entries, left_out


def matmul_gflops(row: str, job: Job, seconds: float = 0.5) -> float:
    """Rate of torch's matrix product of the row's size and precision, in GFLOP/s.

    It is the rate of all processors of this machine, or of the row's cards.
    """
    c = size_of(row.split("/")[0]).config
    dtype = torch.float32 if job.precision == "fp32" else torch.bfloat16
    rows, inner, outer = job.seq * job.micro_batch, c.hidden_size, c.ffn_hidden_size or 4 * c.hidden_size
    a = torch.randn(rows, inner, device=job.accelerator, dtype=dtype)
    b = torch.randn(inner, outer, device=job.accelerator, dtype=dtype)
    counted, best = 0, 0.0
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or counted < 3:
        begun = time.perf_counter()
        found = a @ b
        float(found[0, 0])  # waits for a device
        best = max(best, 2e-9 * rows * inner * outer / (time.perf_counter() - begun))
        counted += 1
    return best * (1 if job.accelerator == "cpu" else job.devices)


def compare(
    row: str, job: Job, entries: Sequence[Entry], *, rounds: int, limit: float, until: float = math.inf
) -> Contest:
    """Train a row's contestants.

    A contestant that fails is dropped, and the end of its output is recorded.

    Args:
        row: name of the row.
        job: its training.
        entries: contestants, ours first.
        rounds: counted rounds, after one to warm up.
        limit: seconds in which a round must end.
        until: time (``time.monotonic``) after which only ``FEWEST_ROUNDS`` are made.
    """
    contest, begun = Contest(row), time.monotonic()
    together = job.accelerator == "cpu"
    for group in [list(entries)] if together else [[entry] for entry in entries]:
        with ExitStack() as stack:
            running: list[Contestant] = []
            for entry in group:
                contestant = entry.begin()
                stack.callback(contestant.stop)
                running.append(contestant)
                contest.rounds[entry.name] = contestant.rounds
            for number in range(rounds + 1):
                if number >= FEWEST_ROUNDS and time.monotonic() > until:
                    break
                for contestant in list(running):
                    try:
                        contestant.run(seconds=limit)
                    except ContestantError as error:
                        contestant.stop()
                        running.remove(contestant)
                        contest.faults.append(str(error))
                contest.gflops = max(contest.gflops, matmul_gflops(row, job))
    contest.rounds = {name: found for name, found in contest.rounds.items() if found}
    contest.done = {
        "flops_per_token": size_of(row.split("/")[0]).config.flops_per_token(job.seq),
        "seconds": time.monotonic() - begun,
    }
    return contest


def facts_of_run(argv: Sequence[str], folder: Path) -> dict[str, Any]:
    """Machine, versions and command, for the report."""
    cpu = platform.processor() or platform.machine()
    told = Path("/proc/cpuinfo")
    if told.exists():
        names = (line.partition(":")[2].strip() for line in told.read_text().splitlines() if "model name" in line)
        cpu = next(names, cpu)
    versions = {"ours": {"torch": str(torch.__version__)}}
    versions |= {p.environment: versions_of(p.environment, folder) for p in PEERS.values() if p.environment}
    return {
        "kind": "run",
        "machine": f"{cpu}, {os.cpu_count()} processors ({torch.backends.cpu.get_cpu_capability()})",
        "date": f"{datetime.date.today():%d %B %Y}",
        "versions": {name: found for name, found in versions.items() if found},
        "command": " ".join(argv),
    }


def plan(rows: Sequence[str], accelerator: str) -> str:
    """Contestants of rows and, for a device, memory of ours on a card by arithmetic."""
    lines = ["| row | tokens of a step | contestants | GB on a card |", "|---|---|---|---|"]
    for row in rows:
        job = job_of_row(row, Path(), accelerator)
        entries, _ = entries_of(row, job, Path(), None, ())
        memory = "-" if accelerator == "cpu" else f"{card_memory(row).gb:.0f}"
        names = ", ".join(entry.name for entry in entries)
        lines.append(f"| {row} | {job.micro_batches} x {job.micro_batch} x {job.seq} | {names} | {memory} |")
    return "\n".join(lines)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    groups = ", ".join(GROUPS)
    parser.add_argument("--rows", nargs="+", default=list(SHORT), help=f"rows such as llama-tiny/bf16/tp2, or {groups}")
    parser.add_argument("--peers", nargs="*", default=None, choices=list(PEERS), help="contestants besides ours (all)")
    parser.add_argument("--checkout", nargs="*", type=Path, default=[], help="other checkouts of ours to compare with")
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds, after one to warm up")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="time for all rows; each has 2 counted rounds or more"
    )
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps of a round")
    parser.add_argument("--seq", type=int, default=None, help="tokens of a sample, instead of the model's own")
    parser.add_argument("--micro-batch", type=int, default=None, help="samples of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=None, help="micro-batches of a step, over all replicas")
    parser.add_argument("--accelerator", default=None, help='torch\'s device type ("cpu"; "cuda" for rows of gpu)')
    parser.add_argument("--compile", action="store_true", help="models through torch.compile")
    parser.add_argument("--limit", type=float, default=600, help="seconds in which a round must end")
    parser.add_argument("--resume", action="store_true", help="keep rows that are complete under --out")
    parser.add_argument("--install", action="store_true", help="only make environments and weights")
    parser.add_argument("--plan", action="store_true", help="only print contestants and memory")
    parser.add_argument("--cache", type=Path, default=ROOT / ".bench", help="environments and weights")
    parser.add_argument("--out", type=Path, default=ROOT / ".bench" / "out")
    return parser.parse_args(argv)


def _job(row: str, args: argparse.Namespace, weights: Path) -> Job:
    job = job_of_row(row, weights, args.accelerator, steps=args.steps, compiled=args.compile)
    changes = {name: getattr(args, name) for name in ("seq", "micro_batch", "micro_batches")}
    job = replace(job, **{name: value for name, value in changes.items() if value is not None})
    if job.micro_batches % job.replicas:
        raise SystemExit(f"row {row!r}: {job.micro_batches} micro-batches are not divisible by {job.replicas} replicas")
    return job


def _write(out: Path, facts: dict[str, Any], contests: Sequence[Contest]) -> None:
    """Files of all rows so far."""
    lines = [json.dumps(facts), *(line for contest in contests for line in results.lines_of(contest))]
    part = out / "rounds.jsonl.part"
    part.write_text("\n".join(lines) + "\n")
    part.replace(out / "rounds.jsonl")
    (out / "table.md").write_text(results.table(contests) + "\n")
    try:
        results.chart(contests, out / "chart.png")
    except ImportError:
        print("no chart: matplotlib is not installed (the extra `plot` has it)", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    args.accelerator = args.accelerator or ("cuda" if any(name.startswith("gpu") for name in args.rows) else "cpu")
    rows, cache = rows_of(args.rows), args.cache.resolve()
    envs = cache / "envs"
    if args.plan:
        print(plan(rows, args.accelerator))
        return 0
    for row in rows:
        _job(row, args, Path())  # refuse faulty rows before anything is trained
    args.out.mkdir(parents=True, exist_ok=True)
    contests: list[Contest] = []
    if args.resume and (args.out / "rounds.jsonl").exists():
        contests = [c for c in results.read(args.out / "rounds.jsonl")[1] if c.done]
    facts = facts_of_run(sys.argv[1:] if argv is None else argv, envs)
    open_rows = [row for row in rows if row not in [c.row for c in contests]]
    end = time.monotonic() + 60 * args.minutes
    for number, row in enumerate(open_rows):
        job = _job(row, args, weights_of(row.split("/")[0], cache / "weights"))
        entries, left_out = entries_of(row, job, envs, args.peers, args.checkout)
        if args.install:
            for name in {PEERS[e.name].environment for e in entries if e.name in PEERS}:
                python_of(name, envs)
            continue
        now = time.monotonic()
        print(f"{row}: {', '.join(entry.name for entry in entries)}", file=sys.stderr)
        until = now + (end - now) / (len(open_rows) - number)
        contest = compare(row, job, entries, rounds=args.rounds, limit=args.limit, until=until)
        print(f"  {contest.done['seconds']:.0f} s", file=sys.stderr)
        for fault in contest.faults:
            print(f"  {fault}", file=sys.stderr)
        contest.faults += left_out
        contests.append(contest)
        _write(args.out, facts, contests)
    print(results.table(contests))
    return 0 if all("ours" in c.rounds for c in contests) else 1


if __name__ == "__main__":
    sys.exit(main())
