"""Memory by formula against memory of a rehearsal, for layouts of models of real size.

    python benchmarks/plan_memory.py --only mixtral     # rehearse these layouts, unless their figures are stored
    python benchmarks/plan_memory.py --no-rehearsal --write benchmarks/plan_memory_202611.md

Figures of rehearsals are stored in ``benchmarks/data/plan_memory.json``; ``tests/unit/planning/test_memory_table.py``
compares formulas with them too. After a change of layers, delete a layout from the file and run again.

A row is one pipeline rank of one layout: the peak and the bytes after a step by the closed formulas of
``tools/planning/memory``, and by the tracker of ``rehearsal``, which runs the real modules, optimizer and schedule of
that rank on fake tensors. Both count tensors of a CPU's kernels (``planning.memory.shapes.HOST``).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.recompute_plan import RecomputePlan
from lightning_megatron.models.presets import preset
from lightning_megatron.tools.planning.core.job import PlannedJob
from lightning_megatron.tools.planning.memory.peak import memory_of
from lightning_megatron.tools.planning.memory.shapes import HOST

RECOMPUTE: dict[str, RecomputePlan] = {
    "none": RecomputePlan(),
    "core_attn": RecomputePlan("core_attn"),
    "attention": RecomputePlan("attention"),
    "mlp": RecomputePlan("mlp"),
    "attention+mlp": RecomputePlan(["attention", "mlp"]),
    "moe": RecomputePlan("moe"),
    "full": RecomputePlan("full"),
    "full, groups of 2": RecomputePlan("full", num_layers=2),
    "full, block of 2": RecomputePlan("full", "block", num_layers=2),
    "full, in shares": RecomputePlan("full", shard_saved=True),
}


KEPT = Path(__file__).parent / "data" / "plan_memory.json"


class Case(NamedTuple):
    """A layout of a model.

    Attributes:
        model: preset.
        ranks: ranks of the job.
        sizes: sizes of the layout.
        seq_length: tokens of a sample.
        recompute: key of ``RECOMPUTE``.
        rank: pipeline rank that is measured.
        options: other fields of the job.
        changes: changed fields of the configuration.
    """

    model: str
    ranks: int
    sizes: dict[str, Any]
    seq_length: int = 2048
    recompute: str = "none"
    rank: int = 0
    options: dict[str, Any] = {}  # noqa: RUF012
    changes: dict[str, Any] = {}  # noqa: RUF012

    def job(self) -> PlannedJob:
        """The job."""
        config = preset(self.model).replace(**self.changes)
        layout = ParallelLayout(**self.sizes).resolve(self.ranks)
        options = {"micro_batch_size": 1, "num_micro_batches": 4, **self.options}
        return PlannedJob(config, layout, self.seq_length, recompute=RECOMPUTE[self.recompute], **options)

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in self.sizes.items()]
        words += [f"{name}={value}" for name, value in {**self.options, **self.changes}.items()]
        return f"{self.model}, {self.ranks} ranks, {', '.join(words)}, recompute {self.recompute}, rank {self.rank}"


GPT, LLAMA, MIXTRAL, DEEPSEEK = "gpt3-7.5b", "llama2-7b", "mixtral-8x7b", "deepseek-v2"


def cases() -> Iterator[Case]:
    """All layouts."""
    yield from _dense()
    yield from _pipelines()
    yield from _contexts()
    yield from _experts()
    yield from _latents()
    yield from _large()


FEW = {"num_layers": 4}
"""Fewer layers, so that the whole table takes minutes; a layer keeps its true size."""


def _dense() -> Iterator[Case]:
    several: dict[str, Any] = {"micro_batch_size": 4}
    for model in (GPT, LLAMA):
        for recompute in RECOMPUTE:
            if recompute == "moe":
                continue
            shares = {"sequence_parallel": False} if "shares" in recompute else {}
            yield Case(model, 4, {"tp": 4, **shares}, recompute=recompute, options=several, changes=FEW)
        for precision in ("32-true", "bf16-true", "bf16-mixed"):  # a CPU has no 16-mixed
            for sharded in (True, False):
                options = {"precision": precision, "distributed_optimizer": sharded}
                yield Case(model, 8, {"tp": 4}, options=options, changes=FEW)
            if precision != "bf16-mixed":  # the default, above
                yield Case(model, 4, {"tp": 4}, options={"precision": precision, **several}, changes=FEW)
        for sizes in ({"tp": 2}, {"tp": 8}, {"tp": 4, "sequence_parallel": False}):
            yield Case(model, sizes.get("tp", 1), sizes, recompute="full", options=several, changes=FEW)
            yield Case(model, sizes.get("tp", 1), sizes, options=several, changes=FEW)
        yield Case(model, 32, {"tp": 4}, options={"grad_reduce_dtype": "bf16"}, changes=FEW)
        yield Case(model, 32, {"tp": 4}, options={"overlap_grad_reduce": False}, changes=FEW)
    yield Case("llama3.1-8b", 2, {"tp": 2}, 4096, changes=FEW)


def _pipelines() -> Iterator[Case]:
    many = {"num_micro_batches": 6, "micro_batch_size": 2}
    for model in (GPT, LLAMA):
        for schedule in ("gpipe", "1f1b", "zero-bubble"):
            for rank in (0, 1, 3):
                options, changes = {"schedule": schedule, **many}, {"num_layers": 8}
                yield Case(model, 8, {"tp": 2, "pp": 4}, rank=rank, options=options, changes=changes)
        for schedule in ("interleaved", "zero-bubble"):
            for rank in (0, 3):
                options, sizes = {"schedule": schedule, **many}, {"tp": 2, "pp": 4, "vpp": 3 if model == GPT else 2}
                yield Case(model, 8, sizes, rank=rank, options=options, changes={"num_layers": 4 * sizes["vpp"]})
        for rank in (0, 3):
            yield Case(model, 8, {"tp": 2, "pp": 4}, 2048, "full", rank, many, {"num_layers": 8})
        yield Case(model, 4, {"tp": 2, "pp": 2}, 2048, "attention", 1, many, FEW)


def _contexts() -> Iterator[Case]:
    for kind in ("p2p", "all_gather", "a2a"):
        for recompute in ("none", "core_attn", "full"):
            yield Case("llama3.1-8b", 4, {"tp": 2, "cp": 2, "cp_comm_type": kind}, 2048, recompute, changes=FEW)
        yield Case(GPT, 4, {"tp": 2, "cp": 2, "cp_comm_type": kind}, 2048, changes=FEW)
        yield Case(
            "llama3.1-8b",
            16,
            {"tp": 2, "cp": 4, "pp": 2, "cp_comm_type": kind},
            4096,
            rank=1,
            changes={"num_layers": 8},
        )

        # Without the pieces of a CPU's reduce-scatter, activations make the fullest moment.
        whole = {"micro_batch_size": 2, "distributed_optimizer": False}
        for recompute in ("none", "core_attn"):
            sizes = {"tp": 2, "cp": 2, "cp_comm_type": kind}
            yield Case("llama3.1-8b", 4, sizes, 2048, recompute, options=whole, changes=FEW)


def _experts() -> Iterator[Case]:
    layouts: tuple[tuple[int, dict[str, Any]], ...] = (
        (8, {"ep": 8}),
        (4, {"tp": 2, "ep": 4, "etp": 1}),
        (8, {"tp": 2, "ep": 4, "etp": 2}),
        (16, {"tp": 2, "pp": 4, "ep": 4, "etp": 1}),
    )
    two = {"micro_batch_size": 2, "overlap_grad_reduce": False}
    for dispatcher in ("alltoall", "allgather"):
        changes: dict[str, Any] = {"moe_token_dispatcher": dispatcher, **FEW}
        for ranks, sizes in layouts:
            yield Case(MIXTRAL, ranks, sizes, options=two, changes=changes)
        for recompute in ("attention", "moe", "mlp", "full"):
            yield Case(MIXTRAL, *layouts[1], 2048, recompute, options=two, changes=changes)
    for padded in (False, True):
        for factor in (1.0, 1.5):
            capacity = {"moe_capacity_factor": factor, "moe_pad_to_capacity": padded, **FEW}
            yield Case(MIXTRAL, *layouts[1], options=two, changes=capacity)
    for precision in ("32-true", "bf16-true"):
        yield Case(MIXTRAL, 8, {"ep": 8}, options={"precision": precision}, changes=FEW)
    yield Case(MIXTRAL, 8, {"tp": 2, "ep": 4, "etp": 1}, options={"expert_imbalance": 1.5, **two}, changes=FEW)


def _latents() -> Iterator[Case]:
    """Attention with latents, and experts beside one that every token visits."""
    one = {"overlap_grad_reduce": False}
    dense = {"num_layers": 4, "moe_layers": (), "num_experts": 0}
    few = {"num_layers": 4, "moe_layers": (1, 2, 3)}
    for recompute in ("none", "core_attn", "attention", "full"):
        yield Case(DEEPSEEK, 2, {"tp": 2}, 4096, recompute, options=one, changes=dense)
    yield Case(DEEPSEEK, 2, {"tp": 2, "sequence_parallel": False}, options=one, changes=dense)
    for kind in ("p2p", "all_gather", "a2a"):
        yield Case(DEEPSEEK, 2, {"cp": 2, "cp_comm_type": kind}, options=one, changes=dense)
    yield Case(DEEPSEEK, 8, {"ep": 8}, 4096, options=one, changes=few)
    for recompute in ("none", "moe"):
        yield Case(DEEPSEEK, 8, {"tp": 2, "ep": 8, "etp": 1}, 4096, recompute, options=one, changes=few)
    for rank in (0, 1):
        options = {"schedule": "zero-bubble" if rank else "1f1b", **one}
        yield Case(DEEPSEEK, 8, {"pp": 2, "ep": 4}, 4096, rank=rank, options=options, changes=few)


def _large() -> Iterator[Case]:
    """Whole models, and one rank alone, whose loss takes a few rows at a time: minutes each."""
    for model in (GPT, LLAMA):
        yield Case(model, 8, {"tp": 4})
    yield Case(MIXTRAL, 32, {"tp": 2, "pp": 4, "ep": 4, "etp": 1}, 4096, rank=3)
    yield Case("llama2-70b", 1024, {"tp": 8, "pp": 4}, options={"num_micro_batches": 16})
    yield Case("llama3.1-70b", 512, {"tp": 8, "pp": 8}, 4096, "full", options={"num_micro_batches": 16})
    yield Case("gpt3-310.1b", 3072, {"tp": 8, "pp": 16}, 2048, "full", 0, {"num_micro_batches": 24})
    for model in (GPT, LLAMA):
        yield Case(model, 1, {}, options={"micro_batch_size": 2}, changes=FEW)


class Row(NamedTuple):
    """Figures of a case, in bytes.

    Attributes:
        case: the case.
        formula: peak by formula.
        measured: peak of the rehearsal.
        states: bytes after a step by formula.
        measured_states: bytes of parameters, gradients and optimizer state after a step of the rehearsal.
        moments: moments of the two peaks.
        causes: bytes by cause at the formula's peak.
    """

    case: Case
    formula: int
    measured: int
    states: int
    measured_states: int
    moments: tuple[str, str]
    causes: Mapping[str, int]

    @property
    def error(self) -> float:
        """Error of the formula."""
        return self.formula / self.measured - 1


OWNED = ("parameters", "gradients", "main parameters", "optimizer state")


def rehearsed(case: Case) -> dict[str, Any]:
    """Figures of a rehearsal, as they are stored in the file."""
    from lightning_megatron.tools.rehearsal.rehearse import rehearse_job

    found = rehearse_job(case.job(), case.rank)
    return {
        "peak": found.peak,
        "moment": found.moment,
        "by_cause": dict(found.by_cause),
        "states": sum(found.after_step_by_cause.get(cause, 0) for cause in OWNED),
        "micro_batches": found.micro_batches,
    }


def read_kept(path: Path = KEPT) -> dict[str, dict[str, Any]]:
    """Figures of rehearsals by layout."""
    kept: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    return kept


def write_kept(path: Path, kept: Mapping[str, Mapping[str, Any]]) -> None:
    """Write figures of rehearsals, a line for each layout."""
    lines = (f"{json.dumps(name)}: {json.dumps(found)}" for name, found in kept.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def compare(case: Case, found: Mapping[str, Any]) -> Row:
    """Compare the formula with a rehearsal, for the number of micro-batches that the rehearsal has run."""
    shown = case._replace(options={**case.options, "num_micro_batches": found["micro_batches"]})
    estimate = memory_of(shown.job(), case.rank, HOST)
    moments = (estimate.moment, found.get("moment", "not kept"))
    return Row(case, estimate.peak, found["peak"], estimate.after_step, found["states"], moments, estimate.by_cause)


def _print(row: Row, found: Mapping[str, Any]) -> None:
    for name, peak, moment, causes in (
        ("formula", row.formula, row.moments[0], row.causes),
        ("rehearsal", row.measured, row.moments[1], found.get("by_cause", {})),
    ):
        sizes = {cause: round(size / 2**20, 1) for cause, size in causes.items() if size >= 1 << 17}
        print(f"    {name:9s} {peak / 2**20:9.1f} MiB, {moment}: {sizes}")


def table(rows: list[Row]) -> str:
    """The rows as a page."""
    errors = sorted(abs(row.error) for row in rows)
    lines = [
        "# Memory by formula against memory of a rehearsal",
        "",
        f"`python benchmarks/plan_memory.py`: {len(rows)} layouts. Error of the formula's peak: "
        f"median {statistics.median(errors):.2%}, largest {errors[-1]:.2%}; within 2 %: "
        f"{sum(error <= 0.02 for error in errors)} of {len(rows)}.",
        "",
        "| layout | formula, GiB | rehearsal, GiB | error | states, error |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        states = row.states / row.measured_states - 1 if row.measured_states else 0.0
        lines.append(
            f"| {row.case} | {row.formula / 2**30:.3f} | {row.measured / 2**30:.3f} | {row.error:+.2%} "
            f"| {states:+.2%} |"
        )
    return "\n".join(lines) + "\n"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of a case's text")
    parser.add_argument("--write", type=Path, help="file for the table")
    parser.add_argument("--list", action="store_true", help="list the cases")
    parser.add_argument("--keep", type=Path, default=KEPT, help="JSON file of figures of rehearsals")
    parser.add_argument("--share", default="0/1", help="every n-th case from the i-th on, as i/n")
    parser.add_argument("--no-rehearsal", action="store_true", help="only cases whose figures are kept")
    parser.add_argument("--verbose", action="store_true", help="causes of every case")
    return parser.parse_args()


def main() -> None:
    """Measure all cases, and print or write the table."""
    arguments = _arguments()
    first, step = map(int, arguments.share.split("/"))
    chosen = [case for case in cases() if all(word in str(case) for word in arguments.only.split("&"))][first::step]
    if arguments.list:
        print("\n".join(map(str, chosen)), len(chosen), sep="\n")
        return
    kept = read_kept(arguments.keep)
    rows = []
    for case in chosen:
        if str(case) not in kept:
            if arguments.no_rehearsal:
                continue
            try:
                kept[str(case)] = rehearsed(case)
            except Exception as error:  # a case that cannot be rehearsed must not hide the others
                print(f"{case}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                continue
            write_kept(arguments.keep, kept)
        rows.append(compare(case, kept[str(case)]))
        print(f"{rows[-1].error:+7.2%} {rows[-1].formula / 2**30:7.2f} {case}", flush=True)
        if arguments.verbose:
            _print(rows[-1], kept[str(case)])
    text = table(rows)
    if arguments.write:
        arguments.write.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
