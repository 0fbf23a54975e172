"""What the steps of ``first_hour.py`` are made of: commands, and what is read of their output.

A step is a few commands and a judge, which reads their output, Lightning's ``metrics.csv`` and the record of a hang.
Paths in braces are filled in when a command runs: ``{here}`` is its own folder, ``{step}`` that of its step, ``{data}``
that of the token files, ``{bin}`` that of this Python's programs.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

Commands = Mapping[str, "Command"]
ALLOWED = ("NCCL_", "TORCH_", "PYTORCH_", "CUDA_", "GLOO_", "OMP_")
"""Beginnings of the names of variables that the report may show."""
LOSS = "train_loss"
MILLISECONDS = "step_time_ms"
PEAK = "allocated_bytes.all.peak"
"""End of the names under which Lightning's DeviceStatsMonitor logs the memory of a card."""
TINY = " --model.dict_kwargs.hidden_size 32 --model.dict_kwargs.num_layers 2 --data.seq_length 32"
GIB = {"MiB": 1 / 1024, "GiB": 1.0}


@dataclass(frozen=True)
class Setup:
    """Where the steps run.

    Args:
        device: ``"cuda"`` or ``"cpu"``, where models and samples are tiny.
        cards: devices of this machine, or processes on a CPU.
        nodes: machines of the step with several.
        node_rank: number of this machine.
        master: address of machine 0.
    """

    device: str = "cuda"
    cards: int = 8
    nodes: int = 1
    node_rank: int = 0
    master: str = "ADDRESS"

    @property
    def used(self) -> int:
        """Cards of one job: a power of two, eight at most."""
        return next(n for n in (8, 4, 2, 1) if n <= self.cards)

    @property
    def victim(self) -> int:
        """Rank that is killed or stopped; never the one that launches the others."""
        return min(3, self.used - 1)

    @property
    def timeout(self) -> int:
        """Seconds after which ranks give up on one that has stopped."""
        return 60 if self.device == "cuda" else 20


@dataclass(frozen=True)
class Command:
    """One command of a step.

    Args:
        words: program and arguments.
        environment: variables to set.
        blow: signal that the victim gets in the third step, or 0.
    """

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    blow: int = 0


@dataclass(frozen=True)
class Ran:
    """What a command has left.

    Args:
        status: exit status; ``None`` if it ran out of time.
        output: all that it printed.
        folder: its own folder.
        culprits: ranks that the record of a run which ended badly blames, the first one first.
        after_blow: seconds from the blow to the end; ``None`` without a blow.
    """

    status: int | None
    output: str
    folder: Path
    culprits: tuple[int, ...] = ()
    after_blow: float | None = None

    def series(self, name: str) -> list[float]:
        """Values of a column of the newest ``metrics.csv``, found by the end of its name."""
        files = sorted(self.folder.glob("**/metrics.csv"), key=lambda path: path.stat().st_mtime)
        rows = [row for path in files[-1:] for row in csv.DictReader(path.open())]
        return [float(value) for row in rows for key, value in row.items() if key.endswith(name) and value]


@dataclass
class Findings:
    """What a judge has seen, and what is wrong."""

    seen: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def expect(self, is_so: bool, text: str) -> None:
        """Note a sentence, as a fault if it does not hold."""
        (self.seen if is_so else self.wrong).append(text)

    def same(self, what: str, found: Ran, expected: Ran, tolerance: float) -> None:
        """Expect the same first loss."""
        pair = found.series(LOSS)[:1], expected.series(LOSS)[:1]
        is_so = all(pair) and abs(pair[0][0] - pair[1][0]) <= tolerance * abs(pair[1][0])
        self.expect(is_so, f"{what}: first loss {pair[0]}, expected {pair[1]} within {tolerance:.1%}")

    def ratio(self, what: str, found: list[float], expected: list[float], most: float) -> None:
        """Expect a median of milliseconds that is not too far above another one."""
        is_so = bool(found and expected) and statistics.median(found) <= most * statistics.median(expected)
        said = [f"{statistics.median(values):.1f}" if values else "nothing" for values in (found, expected)]
        self.expect(is_so, f"{what}: {said[0]} ms a step, at most {most} x {said[1]}")


Judge = Callable[[Mapping[str, Ran], Setup, Findings], None]


@dataclass(frozen=True)
class Step:
    """A row of the table.

    Args:
        name: for ``--only``.
        minutes: time limit of all of its commands.
        cards: cards that it needs.
        finding: findings of the review that it judges.
        seen: what must be seen, in words.
        commands: for a set-up, by name.
        judge: looks at what they left; that all end with status 0 is looked at before, unless one gets a blow.
        on_cpu: False if there is nothing to see without a card.
        nodes: machines that it needs.
    """

    name: str
    minutes: float
    cards: int
    finding: str
    seen: str
    commands: Callable[[Setup], Commands]
    judge: Judge = lambda ran, setup, findings: None
    on_cpu: bool = True
    nodes: int = 1


def ours(*words: str) -> Command:
    """A command of the package."""
    return Command(("{bin}/lightning-megatron", *words))


def fit(
    setup: Setup,
    ranks: int,
    layout: str = "",
    more: str = "",
    *,
    recipe: str = "llama-tiny",
    steps: int = 4,
    replicas: int = 1,
    environment: Mapping[str, str] | None = None,
    blow: int = 0,
    program: tuple[str, ...] = ("{bin}/lightning-megatron",),
) -> Command:
    """Training on the demo's tokens; a global batch has 16 samples in every layout."""
    axes = {"tp": "1"} | dict(pair.split("=") for pair in layout.split())
    precision = "bf16-mixed" if setup.device == "cuda" else "32-true"
    words = f"fit --recipe {recipe} --trainer.accelerator {setup.device} --trainer.devices {ranks}"
    words += f" --trainer.precision {precision} --trainer.max_steps {steps} --trainer.log_every_n_steps 1"
    words += " --trainer.limit_val_batches 0 --trainer.enable_progress_bar false --trainer.enable_checkpointing false"
    words += " --trainer.callbacks null --trainer.callbacks+=lightning_megatron.Throughput --trainer.logger CSVLogger"
    words += " --trainer.logger.save_dir {here} --trainer.default_root_dir {here}"
    words += " --trainer.strategy.micro_batch_size 1 --data.data_path {data}/corpus_text_document"
    words += "".join(f" --trainer.strategy.{axis} {size}" for axis, size in axes.items())
    words += f" --data.batch_size {16 // replicas}"
    tiny = TINY if setup.device == "cpu" else ""
    return Command((*program, *words.split(), *tiny.split(), *more.split()), environment or {}, blow)
