"""``lightning-megatron schedule``: print, price and draw a pipeline schedule without starting a process."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from functools import partial

from lightning_megatron.errors import ConfigError, Problem, nearest_names, raise_if_any
from lightning_megatron.pipeline.action import format_schedule
from lightning_megatron.pipeline.draw import draw_png, draw_text
from lightning_megatron.pipeline.schedule import SCHEDULE_NAMES, build_schedule, forward_only
from lightning_megatron.pipeline.simulate import Costs, Simulation, ideal_bubble, simulate
from lightning_megatron.pipeline.validate import Report, check_schedule
from lightning_megatron.tools.cli.common import command_parser, exit_status, named_by_options

_COST_NAMES = {"F": "forward", "B": "backward", "I": "input_gradient", "W": "weight_gradient", "C": "communication"}
_LEGEND = (
    "F forward, B backward, I and W its halves (gradients of inputs, of weights); behind it the micro-batch,\n"
    "before it the stage where a rank has several. --- busy, blank idle."
)
_OPTIONS = {
    "pp": "--pp",
    "vpp": "--vpp",
    "num_microbatches": "--micro-batches",
    "microbatch_group_size": "--group",
    "pipeline_schedule": "--schedule",
}


def schedule_command(argv: Sequence[str]) -> int:
    """Run ``lightning-megatron schedule`` with these arguments; returns the exit status."""
    args = schedule_parser().parse_args(list(argv))
    return exit_status(lambda: _run(args), ConfigError, ImportError, OSError, text=partial(named_by_options, _OPTIONS))


def schedule_parser() -> argparse.ArgumentParser:
    """The arguments."""
    parser = command_parser("schedule", "Print, price and draw a pipeline schedule.", brief_errors=True)
    parser.add_argument("--pp", type=int, required=True, help="pipeline ranks")
    parser.add_argument("--vpp", type=int, default=1, help="model chunks a rank holds (default 1)")
    parser.add_argument("--micro-batches", type=int, required=True, help="micro-batches of one step")
    parser.add_argument("--schedule", help=f"{', '.join(SCHEDULE_NAMES)} (default: interleaved if vpp > 1, else 1f1b)")
    parser.add_argument("--group", type=int, help="micro-batches a rank takes through a chunk before the next chunk")
    parser.add_argument("--forward-only", action="store_true", help="the schedule of an evaluation")
    parser.add_argument(
        "--costs",
        default="",
        metavar="F=1,B=2,...",
        help="time of a forward (F), a backward (B), its halves (I, W) on a rank, and of a message (C); a chunk takes "
        "1/vpp of it; F=1:1:1:1.5 gives the time of each stage (default F=1,B=2,I=B/2,W=B-I,C=0)",
    )
    parser.add_argument("--png", metavar="FILE", help="draw the timeline; needs matplotlib")
    parser.add_argument("--csv", action="store_true", help="print only the actions, one row per rank")
    return parser


def _run(args: argparse.Namespace) -> int:
    pp, vpp, num_microbatches = args.pp, args.vpp, args.micro_batches
    if args.forward_only:
        name, schedule = "forward-only", forward_only(pp, vpp, num_microbatches)
    else:
        schedule = build_schedule(args.schedule, pp, vpp, num_microbatches, args.group)
        name = args.schedule or ("interleaved" if vpp > 1 else "1f1b")
    costs = parse_costs(args.costs, pp, vpp)
    simulation = simulate(schedule, costs)
    title = f"{name}, pp={pp}, vpp={vpp}, {num_microbatches} micro-batches"
    if args.csv:
        print(format_schedule(schedule), end="")
    else:
        print(draw_text(simulation, shutil.get_terminal_size((120, 24)).columns))
        ideal = None if args.forward_only else ideal_bubble(name, pp, vpp, num_microbatches, costs)
        report = check_schedule(schedule, forward_only=args.forward_only)
        print("\n" + "\n".join([_LEGEND, "", title, *_numbers(simulation, ideal, report, vpp)]))
    if args.png:
        draw_png(simulation, args.png, f"{title}: bubble {simulation.bubble:.1%}")
        if not args.csv:
            print(f"drawn in          {args.png}")
    return 0


def _numbers(simulation: Simulation, ideal: float | None, report: Report, vpp: int) -> list[str]:
    order = "needed in the order" if report.in_order else "not needed in the order"
    posted = "may wait until the action before has ended" if report.rendezvous_safe else "must be posted early"
    promised = "" if ideal is None else f" (theory for equal stages and free messages: {ideal:.2%})"
    return [
        f"step time         {simulation.step_time:g}",
        f"bubble            {simulation.bubble:.2%} of the computing time{promised}",
        f"idle per rank     {' '.join(f'{idle:g}' for idle in simulation.idle)}",
        f"peak activations  {' '.join(f'{peak / vpp:g}' for peak in simulation.peak_activations)} "
        "(micro-batches of all layers of a rank)",
        f"messages          {order} in which they are sent; receives {posted}",
        f"check             {'; '.join(report.faults) or 'complete, in order, free of deadlock'}",
    ]


def parse_costs(text: str, pp: int, vpp: int = 1) -> Costs:
    """Costs from text: ``F=1,B=2`` per rank, divided over its chunks, or ``F=1:1:1:1.5`` per stage.

    Args:
        text: text of ``--costs``.
        pp: pipeline ranks.
        vpp: chunks of a rank.

    Raises:
        ConfigError: for every entry that cannot be read.
    """
    num_stages = pp * vpp
    found: list[Problem] = []
    costs: dict[str, float | tuple[float, ...]] = {"forward": 1 / vpp}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = entry.partition("=")
        try:
            numbers = tuple(float(number) for number in value.split(":"))
        except ValueError:
            numbers = ()
        if fault := _cost_fault(name, numbers, num_stages):
            found.append(Problem("--costs", entry, *fault))
        else:
            costs[_COST_NAMES[name]] = numbers if len(numbers) > 1 else numbers[0] / (1 if name == "C" else vpp)
    raise_if_any(found)
    if "backward" not in costs and {"input_gradient", "weight_gradient"} <= set(costs):
        halves = Costs(**costs)  # type: ignore[arg-type]
        costs["backward"] = tuple(halves.of("I", stage) + halves.of("W", stage) for stage in range(num_stages))
    costs.setdefault("backward", 2 / vpp)
    return Costs(**costs)  # type: ignore[arg-type]


def _cost_fault(name: str, numbers: Sequence[float], num_stages: int) -> tuple[str, tuple[object, ...]] | None:
    """Reason why a cost is invalid, and the nearest values; ``None`` if it is valid."""
    if name not in _COST_NAMES:
        return "no such cost", nearest_names(name, list(_COST_NAMES))
    if not numbers:
        return "a cost is a number, or one number per stage with : between", ()
    if not all(0 <= number < float("inf") for number in numbers):
        return "a time cannot be negative or infinite", ()
    if len(numbers) > 1 and name == "C":
        return "every message takes the same time: give one number", ()
    if len(numbers) not in (1, num_stages):
        return f"{len(numbers)} numbers for {num_stages} stages (pp x vpp)", (1, num_stages)
    return None
