"""Trains with and without ``compile=True`` in turns, and compares the medians.

    python benchmarks/compile_speed.py
    python benchmarks/compile_speed.py --rows llama-tiny/bf16/tp2 gpt-tiny/fp32/single --rounds 8

A row is a model, a precision and a layout, as in ``bench.py``. The first round, in which graphs are made, is not
counted; its seconds are in the table.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench import Entry, compare, start
from environments import ROOT, weights_of
from sizes import job_of_row

ROWS = [
    f"{model}-tiny/{p}/{layout}"
    for layout in ("single", "tp2")
    for model in ("llama", "gpt", "mixtral")
    for p in ("bf16", "fp32")
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=ROWS)
    parser.add_argument("--rounds", type=int, default=6, help="counted rounds, after the one in which graphs are made")
    parser.add_argument("--micro-batches", type=int, default=4, help="micro-batches of a step")
    parser.add_argument("--cache", type=Path, default=ROOT / ".bench", help="weights")
    args = parser.parse_args()
    print("| row | eager / compiled, wall | eager / compiled, CPU | peak MB eager, compiled | first round s |")
    print("|---|---|---|---|---|", flush=True)
    for row in args.rows:
        plain = job_of_row(row, weights_of(row.split("/")[0], args.cache / "weights"), "cpu")
        plain = replace(plain, micro_batches=args.micro_batches)
        jobs = {"eager": plain, "compiled": replace(plain, compiled=True)}
        entries = [Entry(name, partial(start, "ours", job, args.cache / "envs")) for name, job in jobs.items()]
        contest = compare(row, plain, entries, rounds=args.rounds, limit=1200)
        if len(contest.rounds) == len(entries) and not contest.faults:
            wall, cpu = (contest.ratio("eager", figure, to="compiled") for figure in ("wall", "cpu"))
            first = contest.rounds["compiled"][0]["wall"]
            memory = f"{contest.peak_mb('eager'):.0f}, {contest.peak_mb('compiled'):.0f}"
            print(f"| {row} | {wall:.2f} | {cpu:.2f} | {memory} | {first:.0f} |", flush=True)
        for fault in contest.faults:
            print(fault, file=sys.stderr)


if __name__ == "__main__":
    main()
