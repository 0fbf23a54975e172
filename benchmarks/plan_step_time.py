"""Predicted against measured time of a step on this machine's CPU, after a calibration.

    python benchmarks/plan_step_time.py [--device FILE] [--out benchmarks/plan_step_time_cpu_202611.md]

Without ``--device`` the machine is calibrated first. Each layout runs in the Trainer, one process a rank, one thread a
process; the figure is the median of its steps after the first ones. Layouts take turns, in several rounds, so that
other load of the machine affects all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WARM_UP = 3


@dataclass(frozen=True)
class Case:
    """A model and its layout.

    Attributes:
        name: name in the table.
        model: preset.
        changes: fields of the model that differ.
        axes: arguments of the layout.
        seq: tokens of a sample.
        micro: samples of a micro-batch.
        micros: micro-batches of a replica.
        precision: Lightning's name.
        recompute: argument of the strategy.
    """

    name: str
    model: str
    changes: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, Any] = field(default_factory=dict)
    seq: int = 256
    micro: int = 2
    micros: int = 2
    precision: str = "32-true"
    recompute: str | None = None

    @property
    def ranks(self) -> int:
        """Processes."""
        sizes = {**self.axes}
        return int(sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1) * sizes.get("dp", 1))


SMALL = {"num_layers": 4, "vocab_size": 8192}
CASES = (
    Case("llama, one rank", "llama-tiny", SMALL),
    Case("llama, one rank, bf16", "llama-tiny", SMALL, precision="bf16-mixed"),
    Case("gpt, one rank", "gpt-tiny", SMALL),
    Case("llama, full recomputation", "llama-tiny", SMALL, recompute="full"),
    Case("llama, sequence of 1024", "llama-tiny", SMALL, seq=1024, micro=1),
    Case("llama, tp 2", "llama-tiny", SMALL, {"tp": 2}),
    Case("llama, pp 2", "llama-tiny", SMALL, {"pp": 2}, micros=4),
    Case("llama, dp 2", "llama-tiny", SMALL, {"dp": 2}),
    Case("llama, cp 2 by all-to-all", "llama-tiny", SMALL, {"cp": 2, "cp_comm_type": "a2a"}, seq=512),
    Case("mixtral, one rank", "mixtral-tiny", {"vocab_size": 8192}),
    Case("mixtral, ep 2", "mixtral-tiny", {"vocab_size": 8192}, {"dp": 2, "ep": 2}),
)


def planned(case: Case) -> Any:
    """The case as a job of the planner."""
    from lightning_megatron.config.layout import ParallelLayout
    from lightning_megatron.config.recompute_plan import RecomputePlan
    from lightning_megatron.models.presets import preset
    from lightning_megatron.tools.planning.core.job import PlannedJob

    axes = {name: value for name, value in case.axes.items() if name != "dp"}
    return PlannedJob(
        preset(case.model).replace(**case.changes),
        ParallelLayout(**axes).resolve(case.ranks),
        case.seq,
        case.micro,
        case.micros,
        precision=case.precision,
        recompute=RecomputePlan(case.recompute),
    )


def run_rank(case: Case, steps: int, out: Path) -> None:
    """Train in this process, one of the case's ranks, and write the seconds of each step."""
    import lightning as L
    import torch
    from peers.protocol import RandomTokens
    from torch.utils.data import DataLoader

    from lightning_megatron import GPTModule, MegatronStrategy
    from lightning_megatron.models.presets import preset

    torch.set_num_threads(1)

    class Clock(L.Callback):
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self._begun = 0.0

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            now = time.perf_counter()
            if self._begun:
                self.seconds.append(now - self._begun)
            self._begun = now

    config = preset(case.model).replace(
        **case.changes, **({"moe_aux_loss_coeff": 0.0} if "mixtral" in case.model else {})
    )
    clock = Clock()
    axes = {name: value for name, value in case.axes.items() if name != "dp"}
    strategy = MegatronStrategy(micro_batch_size=case.micro, recompute=case.recompute, **axes)
    batch = case.micro * case.micros
    data = DataLoader(RandomTokens(config.vocab_size, case.seq), batch_size=batch)
    trainer = L.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=case.ranks,
        strategy=strategy,
        precision=case.precision,  # type: ignore[arg-type]
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(GPTModule(config), data)
    if trainer.global_rank == 0:
        out.write_text(json.dumps(clock.seconds[WARM_UP:]))


def measure(case: Case, steps: int) -> float:
    """Median seconds of a step, in a process of its own, which starts the other ranks."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds.json"
        words = [sys.executable, __file__, "--case", case.name, "--steps", str(steps), "--seconds", str(out)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{case.name}: {done.stderr[-2000:]}")
        return statistics.median(json.loads(out.read_text()))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--case", help="one case, in this process")
    parser.add_argument("--seconds", type=Path, help="file for the seconds of one case")
    args = parser.parse_args(argv)
    if args.seconds:
        run_rank(next(case for case in CASES if case.name == args.case), args.steps, args.seconds)
        return
    text = compare(args.device, args.rounds, args.steps, args.case)
    print(text)
    if args.out:
        args.out.write_text(text)


def compare(device_file: str | None, rounds: int, steps: int, only: str | None) -> str:
    """The table."""
    from lightning_megatron.tools.calibration import calibrate
    from lightning_megatron.tools.planning.core.device_file import load_device
    from lightning_megatron.tools.planning.time.step import time_of

    device = load_device(device_file) if device_file else calibrate(kind="cpu", processes=2)
    cases = [case for case in CASES if only in (None, case.name)]
    measured: dict[str, list[float]] = {case.name: [] for case in cases}
    for _ in range(rounds):
        for case in cases:
            measured[case.name].append(measure(case, steps))
    lines = [
        "# Predicted and measured steps on a CPU",
        "",
        "Made by `python benchmarks/plan_step_time.py`: one thread a process, Trainer included, device file of a",
        "calibration by two processes.",
        "",
        "| layout | predicted s | measured s | error | largest causes |",
        "|---|---|---|---|---|",
    ]
    errors = []
    for case in cases:
        found = time_of(planned(case), device)
        seconds = statistics.median(measured[case.name])
        errors.append(found.step / seconds - 1)
        causes = sorted(found.by_cause.items(), key=lambda item: -item[1])[:3]
        shares = ", ".join(f"{name} {value / found.step:.0%}" for name, value in causes)
        lines.append(f"| {case.name} | {found.step:.3f} | {seconds:.3f} | {errors[-1]:+.1%} | {shares} |")
    sizes = sorted(map(abs, errors))
    lines += ["", f"Median of the errors' sizes: {statistics.median(sizes):.1%}; largest {sizes[-1]:.1%}.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
