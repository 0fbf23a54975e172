"""The real engine against the simulator: four processes whose stages sleep instead of computing.

    python benchmarks/pipeline_engine.py --png benchmarks/pipeline_engine_cpu_202611.png

Every forward, input gradient and weight gradient of a stage sleeps for a given time; messages, order of actions and the
splitting of backwards are the engine's own. Prints a Markdown table of measured and simulated step times; the picture
shows the simulated timelines and where the measured step ends. Sleeping needs no core, so four processes on fewer cores
do not slow each other; but on a busy machine a sleeper wakes up late. So the last two columns simulate the same order
of actions with the measured duration of every sleep: the remaining difference is the engine's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.pipeline.action import Action, Kind, Message, message_in, message_out
from lightning_megatron.pipeline.draw import COLOURS
from lightning_megatron.pipeline.runtime import PipelineRuntime, training_plan
from lightning_megatron.pipeline.schedule import build_schedule
from lightning_megatron.pipeline.simulate import Costs, Simulation, simulate
from lightning_megatron.testing.workers import WorkerPool
from lightning_megatron.weight_grad_store import WeightGradStore

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A schedule and the seconds that a third of a rank's work on a micro-batch takes."""

    name: str
    pp: int
    vpp: int
    micro_batches: int
    seconds: float

    @property
    def unit(self) -> float:
        """Seconds of a forward, an input gradient or a weight gradient of one stage."""
        return self.seconds / self.vpp

    def simulated(self) -> Simulation:
        costs = Costs(self.unit, 2 * self.unit, self.unit, self.unit)
        return simulate(build_schedule(self.name, self.pp, self.vpp, self.micro_batches), costs)

    def __str__(self) -> str:
        return f"{self.name}, vpp={self.vpp}" if self.vpp > 1 else self.name


class SleepingWork:
    """Stages that sleep, and record how long they really slept."""

    def __init__(self, case: Case, weight_grads: WeightGradStore) -> None:
        self.case, self.weight_grads = case, weight_grads
        self.weight = torch.zeros((), requires_grad=True)
        self.slept: dict[Action, float] = {}

    def sleep(self, stage: int, kind: Kind, microbatch: int) -> None:
        begin = time.perf_counter()
        time.sleep(self.case.unit)
        self.slept[Action(stage, kind, microbatch)] = time.perf_counter() - begin

    def forward(self, stage: int, microbatch: int, hidden: Tensor | None) -> Tensor:
        x = torch.zeros(self.hidden_shape(microbatch), requires_grad=True) if hidden is None else hidden
        out: Tensor = _Sleep.apply(x, self, stage, microbatch)
        return out.sum() if stage == self.case.pp * self.case.vpp - 1 else out

    def hidden_shape(self, microbatch: int) -> tuple[int, ...]:
        return 64, 1, 64


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, work: SleepingWork, stage: int, microbatch: int) -> Tensor:
        ctx.work, ctx.place = work, (stage, microbatch)
        work.sleep(stage, "F", microbatch)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        work, (stage, microbatch) = ctx.work, ctx.place

        def weight_gradient() -> tuple[Tensor]:
            work.sleep(stage, "W", microbatch)
            return (torch.zeros(()),)

        work.sleep(stage, "I", microbatch)
        work.weight_grads.put(weight_gradient, work.weight)
        return grad, None, None, None


def replay(case: Case, slept: Mapping[Action, float]) -> float:
    """Step time of the schedule if every action takes its measured time and everything else takes none."""
    schedule = build_schedule(case.name, case.pp, case.vpp, case.micro_batches)
    num_stages = case.pp * case.vpp
    sent: dict[Message | None, float] = {None: 0.0}
    clock, todo = [0.0] * case.pp, [list(actions) for actions in schedule]
    while any(todo):
        for rank, actions in enumerate(todo):
            while actions and message_in(actions[0], num_stages) in sent:
                action = actions.pop(0)
                kinds: Sequence[Kind] = "IW" if action.kind == "B" else (action.kind,)  # type: ignore[assignment]
                seconds = sum(slept[action._replace(kind=kind)] for kind in kinds)
                clock[rank] = max(clock[rank], sent[message_in(action, num_stages)]) + seconds
                sent[message_out(action, num_stages)] = clock[rank]
                sent[None] = 0.0
    return max(clock)


def measure(case: Case, steps: int) -> list[tuple[float, dict[Action, float]]]:
    """Seconds of each step on this rank, and how long its actions slept; the first step is not counted."""
    mesh = ParallelMesh.create(ParallelLayout(pp=case.pp, vpp=case.vpp), CPU)
    runtime = PipelineRuntime(mesh.pp, case.pp * case.vpp, CPU, torch.float32, mesh.weight_grads)
    plan = training_plan(case.name, case.pp, case.vpp, case.micro_batches, mesh.pp.rank)
    found = []
    for _ in range(steps + 1):
        work = SleepingWork(case, mesh.weight_grads)
        dist.barrier()
        begin = time.perf_counter()
        runtime.run(plan, work)
        found.append((time.perf_counter() - begin, work.slept))
    return found[1:]


def draw(cases: list[Case], measured: list[float], path: Path) -> None:
    """All timelines on one scale of time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 1.7 * len(cases)), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(cases), 1, sharex=True)
    for axes, case, seconds in zip(rows, cases, measured, strict=True):
        simulation = case.simulated()
        for rank, slots in enumerate(simulation.timeline):
            for slot in slots:
                box = [(slot.start, slot.end - slot.start)]
                colour = COLOURS[slot.action.kind]
                faded = 1.0 if slot.action.stage < case.pp else 0.6
                axes.broken_barh(box, (rank - 0.45, 0.9), color=colour, alpha=faded, edgecolor="white", linewidth=0.5)
        axes.axvline(seconds, color="black", linestyle="--", linewidth=1)
        axes.set(ylim=(case.pp - 0.5, -0.5), ylabel="rank")
        axes.set_title(f"{case}: simulated {simulation.step_time:.3f} s, measured {seconds:.3f} s (dashed)", size=9)
        axes.spines[["top", "right"]].set_visible(False)
    rows[-1].set_xlabel("seconds")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.2, help="of a forward of one rank's layers")
    parser.add_argument("--steps", type=int, default=4, help="counted steps of each schedule, after one to warm up")
    parser.add_argument("--png", type=Path)
    args = parser.parse_args()
    chunks = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 1}
    kinds = [*chunks.items(), ("zero-bubble", 2)]
    cases = [Case(name, args.pp, vpp, args.micro_batches, args.seconds) for name, vpp in kinds]
    medians = []
    print("| schedule | bubble | simulated s | measured s | ratio | simulated with the sleeps as they were s | ratio |")
    print("|---|---|---|---|---|---|---|")
    with WorkerPool(args.pp, timeout=600) as pool:
        for case in cases:
            steps = list(zip(*pool.run(args.pp, measure, case, args.steps), strict=True))
            measured = [max(seconds for seconds, _ in step) for step in steps]
            real = [replay(case, {k: v for _, slept in step for k, v in slept.items()}) for step in steps]
            simulation = case.simulated()
            median, ideal = statistics.median(measured), simulation.step_time
            medians.append(median)
            engine = statistics.median(a / b for a, b in zip(measured, real, strict=True))
            print(
                f"| {case} | {simulation.bubble:.1%} | {ideal:.3f} | {median:.3f} | {median / ideal:.3f}"
                f" | {statistics.median(real):.3f} | {engine:.3f} |",
                flush=True,
            )
    if args.png:
        draw(cases, medians, args.png)


if __name__ == "__main__":
    main()
