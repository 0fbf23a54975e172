"""Rounds of a comparison as JSON lines, and the table, the report and the chart that are made from them.

    python benchmarks/results.py .bench/out/rounds.jsonl --title "LLaMA tiny" --rows llama-tiny > report.md

Lines are of four kinds: ``run`` (the machine, versions, the command), a ``round`` of a contestant, a ``fault`` of one,
and ``done`` for a row that is complete.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LOSS_TOLERANCE = {"fp32": 2e-5, "bf16": 1e-3}  # relative, after the first round
LATER = 10  # times as much after the last one: rounding differs from step to step


@dataclass
class Contest:
    """One row.

    Attributes:
        row: model, precision and layout.
        rounds: reports of each contestant, the first one for warming up; ours comes first.
        faults: sentences about contestants that were left out or failed.
        gflops: rate of torch's product beside it, the best of the row.
        done: facts of the row once it is complete: FLOPs of a token, devices, seconds.
    """

    row: str
    rounds: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    gflops: float = 0.0
    done: dict[str, float] = field(default_factory=dict)

    @property
    def precision(self) -> str:
        """Precision of the row."""
        return self.row.split("/")[1]

    def counted(self, name: str) -> list[dict[str, float]]:
        """A contestant's rounds after the first one."""
        return self.rounds[name][1:]

    def median(self, name: str, figure: str) -> float:
        """Median of a figure over a contestant's counted rounds."""
        return statistics.median(r[figure] for r in self.counted(name))

    def rate(self, name: str, figure: str) -> float:
        """Tokens for each second of wall or CPU time."""
        return self.rounds[name][0]["tokens"] / self.median(name, figure)

    def ratio(self, name: str, figure: str, to: str = "ours") -> float | None:
        """Median over rounds of a contestant's figure divided by another's; above 1, the other needs less."""
        if to not in self.rounds:
            return None
        pairs = list(zip(self.counted(name), self.counted(to), strict=False))
        return None if not pairs else statistics.median(theirs[figure] / own[figure] for theirs, own in pairs)

    def peak_mb(self, name: str) -> float:
        """Peak memory of the rank that needs most."""
        return max(r["peak_mb"] for r in self.rounds[name])

    def mfu(self, name: str) -> float:
        """Share of the rate of torch's product that the model's FLOPs reach."""
        return self.rate(name, "wall") * self.done["flops_per_token"] / (self.gflops * 1e9)

    def differing_losses(self) -> list[str]:
        """Sentences about contestants whose losses differ from those of the first one."""
        if not self.rounds:
            return []
        found, (first, own) = [], next(iter(self.rounds.items()))
        for name, rounds in self.rounds.items():
            for number, factor in ((0, 1), (min(len(rounds), len(own)) - 1, LATER)):
                here, there = rounds[number]["loss"], own[number]["loss"]
                if not abs(here - there) <= factor * LOSS_TOLERANCE[self.precision] * abs(there):
                    found.append(
                        f"{name}: loss of round {number} is {here:.5f}, that of {first} {there:.5f}: another training"
                    )
        return found


def read(path: Path) -> tuple[dict[str, Any], list[Contest]]:
    """The run's facts and its rows, in order, from a file of JSON lines."""
    run: dict[str, Any] = {}
    rows: dict[str, Contest] = {}
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        if entry["kind"] == "run":
            run = entry
            continue
        contest = rows.setdefault(entry["row"], Contest(entry["row"]))
        if entry["kind"] == "round":
            figures = {k: v for k, v in entry.items() if isinstance(v, float | int)}
            contest.rounds.setdefault(entry["contestant"], []).append(figures)
        elif entry["kind"] == "fault":
            contest.faults.append(entry["text"])
        else:
            contest.done = {k: v for k, v in entry.items() if isinstance(v, float | int)}
            contest.gflops = entry["gflops"]
    return run, list(rows.values())


def lines_of(contest: Contest) -> Iterator[str]:
    """JSON lines of a row that is complete."""
    for name, rounds in contest.rounds.items():
        for number, figures in enumerate(rounds):
            entry = {"kind": "round", "row": contest.row, "contestant": name, "round": number, **figures}
            yield json.dumps(entry)
    for text in contest.faults:
        yield json.dumps({"kind": "fault", "row": contest.row, "text": text})
    yield json.dumps({"kind": "done", "row": contest.row, "gflops": contest.gflops, **contest.done})


def table(contests: Iterable[Contest]) -> str:
    """A Markdown table of all rows, and a list of contestants that are not in it, with reasons."""
    contests = list(contests)
    lines = [
        "| row | contestant | tokens/s | tokens/CPU s | MFU | peak MB a rank | loss, first and last round"
        " | it / ours, wall | it / ours, CPU |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for contest in contests:
        for name, rounds in contest.rounds.items():
            if not contest.counted(name):
                continue
            ratios = (contest.ratio(name, figure) for figure in ("wall", "cpu"))
            wall, cpu = ("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
            lines.append(
                f"| {contest.row} | {name} | {contest.rate(name, 'wall'):.0f} | {contest.rate(name, 'cpu'):.0f}"
                f" | {contest.mfu(name):.2f} | {contest.peak_mb(name):.0f}"
                f" | {rounds[0]['loss']:.4f}, {rounds[-1]['loss']:.4f} | {wall} | {cpu} |"
            )
    lines.append("")
    told: dict[str, list[str]] = {}
    for contest in contests:
        for fault in contest.faults + contest.differing_losses():
            told.setdefault(fault.splitlines()[0], []).append(contest.row)
    return "\n".join([*lines, *(f"- {fault} ({', '.join(rows)})" for fault, rows in told.items())])


def report(title: str, run: Mapping[str, Any], contests: Sequence[Contest]) -> str:
    """A Markdown page: machine, versions, command, matmul rates, table."""
    versions = [f"{n}: {', '.join(f'{p} {v}' for p, v in found.items())}" for n, found in run["versions"].items()]
    rates: dict[str, float] = {}
    for contest in contests:
        rates[contest.precision] = max(rates.get(contest.precision, 0.0), contest.gflops)
    counts = sorted({len(c.counted(name)) for c in contests for name in c.rounds})
    return "\n".join(
        [
            f"# {title}",
            "",
            f"{run['machine']}; {run['date']}. Packages: {'; '.join(versions)}.",
            "",
            "Contestants begin with the same weights, see the same tokens and train in turns. Ratios are medians over"
            f" rounds ({', '.join(map(str, counts))} counted, after one to warm up), of what the contestant needs to"
            " what ours needs: above 1, ours needs less. CPU seconds are summed over ranks; peak memory is that of the"
            " rank that needs most. MFU is of torch's own product in the same run, all processors:"
            f" {', '.join(f'{p} {rate:.0f} GFLOP/s' for p, rate in rates.items())}.",
            "",
            f"    python benchmarks/bench.py {run['command']}",
            "",
            "(Made by `benchmarks/results.py` from the rounds of that run.)",
            "",
            table(contests),
            "",
        ]
    )


def chart(contests: Sequence[Contest], path: Path) -> None:
    """Bars of tokens/s, a group for each row."""
    from matplotlib import pyplot as plt

    shown = [c for c in contests if any(c.counted(name) for name in c.rounds)]
    if not shown:
        return
    names = list(dict.fromkeys(name for c in shown for name in c.rounds if c.counted(name)))
    figure, axes = plt.subplots(figsize=(max(6.0, 1.6 * len(shown)), 4.5))
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        bars = {
            i + (number - (len(names) - 1) / 2) * width: c.rate(name, "wall")
            for i, c in enumerate(shown)
            if name in c.rounds and c.counted(name)
        }
        axes.bar(list(bars), list(bars.values()), width, label=name)
    axes.set_xticks(range(len(shown)), [c.row.replace("/", "\n") for c in shown], fontsize=7)
    axes.set_ylabel("tokens/s")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", type=Path, help="rounds.jsonl of a run")
    parser.add_argument("--title", default="Ours beside its peers")
    parser.add_argument("--rows", nargs="*", default=[], help="beginnings of names of rows to show (all)")
    parser.add_argument("--chart", type=Path, help="PNG to write")
    args = parser.parse_args()
    run, contests = read(args.rounds)
    wanted = [c for c in contests if c.done and (not args.rows or c.row.startswith(tuple(args.rows)))]
    print(report(args.title, run, wanted), end="")
    if args.chart:
        chart(wanted, args.chart)


if __name__ == "__main__":
    main()
