"""Predictions against published points of other programs: memory, time and the ranking of layouts.

    python benchmarks/plan_anchors.py [--anchors FILE] [--out benchmarks/plan_anchors_202611.md]

Constants are those that ``plan_fit.py`` wrote, fitted to the half of the rows that a hash chooses; this only scores.
FILE is a list of points as ``benchmarks/data/plan_anchors.json`` has them.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from anchors.memory import (
    batches,
    is_reserved,
    our_after_step,
    our_peak,
    predicted_after_step,
    predicted_peak,
    state_of,
    why_not,
)
from anchors.rows import DATA, Anchor, Row, read_rows, translate
from anchors.timing import tokens_per_second
from plan_fit import counts, read


@dataclass(frozen=True)
class Score:
    """A predicted figure beside the measured one."""

    anchor: Anchor
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anchors", type=Path, default=DATA)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", action="store_true", help="every row with its error")
    args = parser.parse_args(argv)
    rows = read_rows(args.anchors)
    text = report(rows, every_row=args.rows)
    print(text)
    if args.out:
        args.out.write_text(text)


def report(rows: Sequence[Row], *, every_row: bool = False) -> str:
    """The whole table."""
    made = [translate(row) for row in rows]
    anchors = [each for each in made if isinstance(each, Anchor)]
    reasons = Counter(each for each in made if isinstance(each, str))
    times = time_scores(anchors)
    fitted = [each for each in times if counts(each.anchor)]
    lines = [
        "# Predictions against published steps",
        "",
        "Made by `python benchmarks/plan_anchors.py` from `benchmarks/data/plan_anchors.json`: points that their",
        "sources published, of other programs; what differs by program is in `benchmarks/anchors/`. Errors are of",
        "tokens a second and of bytes, predicted over measured. Constants were fitted to one half of the rows, by a",
        "hash of source and model, by `plan_fit.py`; the other half is what counts.",
        "",
        f"{len(rows)} rows, {len(anchors)} translated, {len(times)} of them with a time.",
        "",
        "## Time",
        "",
        *table("source", [("fitted half", _halves(fitted, True)), ("other half", _halves(fitted, False))]),
        "",
        "Megatron-LM's CI (deterministic kernels; most models have a hidden size of 512, their steps are the host's),",
        "in no fit:",
        "",
        *table("source", [("all", [each for each in times if not counts(each.anchor)])]),
        "",
        "### A constant rate",
        "",
        "The same rows by the median FLOP/s of device and format of the fitted half, without any formula:",
        "",
        *table("source", [("other half", constant_rate(fitted))]),
        "",
        "## Ranking",
        "",
        *ranking(fitted),
        "",
        "## Memory",
        "",
        *memory_tables(anchors),
        "",
        "## Rows that are not translated",
        "",
        *(f"- {count}: {reason}" for reason, count in reasons.most_common()),
        "",
    ]
    if every_row:
        lines += ["## Rows", "", *(_row_line(each) for each in sorted(times, key=lambda s: s.error)), ""]
    return "\n".join(lines)


def time_scores(anchors: Iterable[Anchor]) -> list[Score]:
    """Tokens a second of all rows that have them."""
    constants = read()
    return [
        Score(each, tokens_per_second(each, constants), each.tokens_per_second)
        for each in anchors
        if each.tokens_per_second
    ]


def constant_rate(scores: Sequence[Score]) -> list[Score]:
    """Scores of the half that was not fitted, predicted with one rate for each device and format."""
    rates = defaultdict(list)

    def flops(each: Score) -> float:
        return each.anchor.job.config.flops_per_token(each.anchor.job.seq_length)

    for each in scores:
        if each.anchor.is_for_the_fit:
            rates[each.anchor.device, each.anchor.dtype].append(each.measured * flops(each))
    return [
        Score(each.anchor, statistics.median(rates[key]) / flops(each), each.measured)
        for each in scores
        if not each.anchor.is_for_the_fit and rates[key := (each.anchor.device, each.anchor.dtype)]
    ]


def _halves(scores: Sequence[Score], fitted: bool) -> list[Score]:
    return [each for each in scores if each.anchor.is_for_the_fit == fitted]


def table(title: str, columns: Sequence[tuple[str, Sequence[Score]]]) -> list[str]:
    """Rows of a table: number, median and 90th percentile of the absolute error, and the median with its sign."""
    sources = sorted({each.anchor.source for _, scores in columns for each in scores})
    header = " | ".join(f"{name}: rows | median | p90 | bias" for name, _ in columns)
    lines = [f"| {title} | {header} |", "|---" * (1 + 4 * len(columns)) + "|"]
    for source in [*sources, "all"]:
        cells = []
        for _, scores in columns:
            errors = [each.error for each in scores if source in ("all", each.anchor.source)]
            cells.append(_cells(errors))
        lines.append(f"| {source} | {' | '.join(cells)} |")
    return lines


def _cells(errors: Sequence[float]) -> str:
    if not errors:
        return "0 | | |"
    sizes = sorted(abs(error) for error in errors)
    last = sizes[min(len(sizes) - 1, math.ceil(0.9 * len(sizes)) - 1)]
    return f"{len(errors)} | {statistics.median(sizes):.1%} | {last:.1%} | {statistics.median(errors):+.1%}"


def groups_of(scores: Iterable[Score]) -> Mapping[tuple[object, ...], list[Score]]:
    """Rows of one program and release, model, device, number of devices and sequence, with several layouts."""
    groups = defaultdict(list)
    for each in scores:
        row = each.anchor.row
        key = (row["framework"], row["model"], each.anchor.device, row["n_gpu"], row["seq"], each.anchor.dtype)
        groups[key].append(each)
    return {key: found for key, found in groups.items() if len({_layout(each.anchor) for each in found}) > 1}


def _layout(anchor: Anchor) -> tuple[object, ...]:
    job = anchor.job
    return (job.layout, job.micro_batch_size, job.recompute)


def ranking(scores: Sequence[Score]) -> list[str]:
    """The best layout by prediction against the best one published, and Spearman's rank correlation."""
    groups = groups_of(scores)
    lines = [
        "Groups of one program and release, model, number of devices and sequence length, with several layouts. Lost",
        "is what the predicted best layout has fewer tokens a second than the published best one.",
        "",
        "| program | model | devices | layouts | lost | Spearman |",
        "|---|---|---|---|---|---|",
    ]
    lost = []
    for (source, model, _, devices, _, _), found in sorted(groups.items(), key=str):
        chosen = max(found, key=lambda each: each.predicted)
        best = max(each.measured for each in found)
        lost.append(1 - chosen.measured / best)
        rank = spearman([each.predicted for each in found], [each.measured for each in found])
        lines.append(f"| {source} | {model} | {devices} | {len(found)} | {lost[-1]:.1%} | {rank:.2f} |")
    if lost:
        within = sum(each <= 0.05 for each in lost)
        everything = [(each.predicted, each.measured) for each in scores]
        overall = spearman([p for p, _ in everything], [m for _, m in everything])
        lines += [
            "",
            f"Within 5 % of the best in {within} of {len(lost)} groups. "
            f"Spearman of all rows with a time, over all models and devices: {overall:.3f}.",
        ]
    return lines


def spearman(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Spearman's rank correlation; equal values share their rank."""
    a, b = _ranks(xs), _ranks(ys)
    mean = (len(a) - 1) / 2
    spread = math.sqrt(sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b))
    return sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True)) / spread if spread else 1.0


def _ranks(values: Sequence[float]) -> list[float]:
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2 for value in values
    ]


def memory_tables(anchors: Sequence[Anchor]) -> list[str]:
    """Peak, and bytes after a step, by what the programs keep and by what our library keeps."""
    measured = [each for each in anchors if each.memory]
    peaks = [each for each in measured if not why_not(each)]
    reasons = Counter(f"{each.source}: {why_not(each)}" for each in measured if why_not(each))
    after = [each for each in anchors if each.after_step]
    large = [each for each in after if (each.after_step or 0) > 5e9]

    def scores(chosen: Sequence[Anchor], predict: Callable[[Anchor], float], name: str) -> list[Score]:
        return [Score(each, predict(each), getattr(each, name)) for each in chosen]

    allocated = [each for each in peaks if not is_reserved(each)]
    return [
        "Peak by the formulas with what the row's program is known to keep (`benchmarks/anchors/keeping.py`), and by",
        "`memory_of` alone, what this library keeps for the same job. No constant was fitted. The rows are those whose",
        "figure is the bytes of tensors (allocated), which is what is predicted.",
        "",
        *table(
            "source",
            [
                ("by program", scores(allocated, predicted_peak, "memory")),
                ("this library", scores(allocated, our_peak, "memory")),
            ],
        ),
        "",
        *_reserve([each for each in peaks if is_reserved(each)]),
        "",
        "Rows with a memory that is not predicted:",
        "",
        *(f"- {count}: {reason}" for reason, count in reasons.most_common()),
        "",
        "Bytes after a step, of Megatron-LM's CI:",
        "",
        *table(
            "source",
            [
                ("by program", scores(after, predicted_after_step, "after_step")),
                ("by program, above 5 GB", scores(large, predicted_after_step, "after_step")),
                ("this library, above 5 GB", scores(large, our_after_step, "after_step")),
            ],
        ),
        "",
        *_with_batches(large),
    ]


def _reserve(anchors: Sequence[Anchor]) -> list[str]:
    """Lines about rows whose figure is memory that an allocator had reserved: an upper bound of the prediction."""
    reserves = sorted((each.memory or 0.0) / predicted_peak(each) - 1 for each in anchors)
    states = sorted(state_of(each) / (each.memory or 1.0) for each in anchors)
    below = sum(each < 0 for each in reserves)
    return [
        f"{len(anchors)} rows of nanotron tell what the allocator had reserved (`keeping.py` says how that is known), "
        "and are no measure of",
        f"the error. They are {reserves[0]:.0%} to {reserves[-1]:.0%} above the prediction, "
        f"{statistics.median(reserves):.0%} in the median, and {below} of them below it; the state alone",
        f"is {states[0]:.0%} to {states[-1]:.0%} of them.",
    ]


def _with_batches(anchors: Sequence[Anchor]) -> list[str]:
    """Lines about masks and labels of a step that a run may still hold, for the rows of large models."""
    lines = ["The same rows with the masks and labels of a step, which some runs hold until the next one:", ""]
    for each in anchors:
        predicted, measured = predicted_after_step(each), each.after_step or 1.0
        lines.append(
            f"- {each.row['model'].split('/')[-1]}: {measured - predicted:+,.0f} bytes beyond the prediction ("
            f"{predicted / measured - 1:+.2%}); masks and labels are {batches(each):,} "
            f"({(predicted + batches(each)) / measured - 1:+.2%})"
        )
    return lines


def _row_line(each: Score) -> str:
    row, layout = each.anchor.row, each.anchor.job.layout
    half = "fit" if each.anchor.is_for_the_fit else "test"
    return (
        f"{each.error:+.1%} {half} {each.anchor.source} | {row['model']} | {each.anchor.device} {each.anchor.dtype} "
        f"n{row['n_gpu']} tp{layout.tp} pp{layout.pp} vpp{layout.vpp} cp{layout.cp} ep{layout.ep} seq {row['seq']} "
        f"mb{each.anchor.job.micro_batch_size} x {each.anchor.job.num_micro_batches} {row.get('recompute')} "
        f"{each.predicted:.0f} for {each.measured:.0f}"
    )


if __name__ == "__main__":
    main()
