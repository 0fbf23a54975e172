"""``lightning-megatron parity``: one training in two layouts, side by side, and the first layer that differs."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.errors import ConfigError, Problem, nearest_names, raise_if_any
from lightning_megatron.tools.cli.common import below_one, command_parser, exit_status, fail
from lightning_megatron.tools.cli.recipes.job import Given, read_recipe
from lightning_megatron.tools.cli.recipes.options import add_recipe, required, with_environment
from lightning_megatron.tools.parity.difference import Step, first_difference, not_compared
from lightning_megatron.tools.parity.recipe import AXES, Settings, in_layout, layout_of, twin_recipe, write_tokens
from lightning_megatron.tools.parity.run import RunError, run
from lightning_megatron.tools.parity.twin import twin_layout

_DESCRIPTION = """Train a recipe's small twin in its layout and in another one, and compare them number by number.

The twin has the recipe's layout (at most two replicas) and the smallest model that it divides; data are random tokens.
Both runs see the same samples. The command prints losses and gradient norms side by side, and the first layer whose
output, or the first parameter whose gradient, differs.
With --full the recipe's own module runs, which may be yours; its loader must give the same samples in both layouts.
Exit status: 0 they agree, 1 they differ or a run has failed, 2 arguments that cannot work."""

_EXAMPLES = """examples:
  lightning-megatron parity --recipe mixtral-8x7b
  lightning-megatron parity --recipe llama3.1-70b --against tp=1 --steps 5
  lightning-megatron parity --config mine.yaml --full --against pp=1 --precision bf16-mixed --tolerance 0.02"""


def parity_command(argv: Sequence[str]) -> int:
    """Run ``lightning-megatron parity`` with these arguments; returns the exit status."""
    parser = command_parser("parity", _DESCRIPTION, _EXAMPLES, brief_errors=True)
    add_recipe(parser)
    parser.add_argument("--against", default="", metavar="AXIS=N,...", help="axes to change (default: one process)")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps (default 3)")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="relative difference that counts as rounding")
    parser.add_argument("--precision", default="32-true", help="Lightning's name (default 32-true)")
    parser.add_argument("--accelerator", default="cpu", help="Lightning's name (default cpu)")
    parser.add_argument("--full", action="store_true", help="the recipe's own module and data, not a small twin")
    parser.add_argument("--seconds", type=float, default=1800, help="time limit of a run (default 1800)")
    return exit_status(lambda: _compare(parser.parse_args(argv)), ConfigError)


def _compare(options: argparse.Namespace) -> int:
    raise_if_any(_number_problems(options))
    files = required(options)
    recipe = with_environment(files, os.environ)
    settings = Settings(options.steps, options.precision, options.accelerator)
    with tempfile.TemporaryDirectory(prefix="parity-") as name:
        folder = Path(name)
        if options.full:
            own = layout_of(recipe)
        else:
            job = read_recipe(files, Given())
            own = twin_layout(job.layout)
            recipe = twin_recipe(recipe, job, folder, own)
            write_tokens(folder / "tokens")
        layouts = own, other_layout(own, options.against)
        recipes = [in_layout(recipe, own, layout, settings) for layout in layouts]
        found: dict[str, list[Step]] = {}
        for word, layout, contents in zip(("first", "second"), layouts, recipes, strict=True):
            print(f"{word}: {_sizes(layout)}", flush=True)
            try:
                found[word] = run(contents, folder / word, options.seconds)
            except RunError as error:
                fail(f"the run of {_sizes(layout)} failed:\n{error}")
                return 1
    return _report(found["first"], found["second"], options.tolerance)


def _number_problems(options: argparse.Namespace) -> list[Problem]:
    """Faults of single numbers; a NaN is one too."""
    found = below_one(options, "steps")
    if not 0 <= options.tolerance < 1:
        found.append(Problem("--tolerance", options.tolerance, "must be at least 0 and below 1", (1e-4,)))
    if not options.seconds > 0:
        found.append(Problem("--seconds", options.seconds, "must be above 0", (1800,)))
    return found


def other_layout(own: ParallelLayout, against: str) -> ParallelLayout:
    """The layout to compare with.

    Args:
        own: the recipe's, resolved.
        against: ``"tp=1,pp=1"``: axes that differ; empty for one process.

    Raises:
        ConfigError: for words that are no sizes of axes, or sizes that contradict each other.
    """
    found: list[Problem] = []
    changes: dict[str, Any] = {} if against else dict.fromkeys(AXES, 1)
    for word in filter(None, against.split(",")):
        axis, _, number = word.strip().partition("=")
        if axis not in AXES:
            found.append(Problem("--against", word, "no such axis", nearest_names(axis, AXES)))
        elif not number.isdigit() or not int(number):
            found.append(Problem("--against", word, "needs a number of ranks", (f"{axis}=1",)))
        else:
            changes[axis] = int(number)
    raise_if_any(found)
    if "tp" in changes:  # their defaults follow from it
        changes |= {"sequence_parallel": None} | ({} if "etp" in changes else {"etp": None})
    if changes.get("pp") == 1:
        changes["vpp"] = 1
    other = replace(own, **changes)
    return other.resolve(other.model_parallel_size * other.data_parallel_size)


def _report(first: Sequence[Step], second: Sequence[Step], tolerance: float) -> int:
    if len(first) != len(second) or not first:
        print(f"they cannot be compared: the runs took {len(first)} and {len(second)} optimizer steps")
        return 1
    print("step        loss      second    grad norm       second")
    for number, (a, b) in enumerate(zip(first, second, strict=True)):
        print(f"{number:4} {a.loss:11.7f} {b.loss:11.7f} {a.grad_norm:12.7g} {b.grad_norm:12.7g}")
    left_out = not_compared(first[0], second[0], tolerance)
    if left_out:
        print(f"not compared, since their outputs have other sizes or are parts of a sum: {', '.join(left_out)}")
    difference = first_difference(first, second, tolerance)
    if difference is None:
        layers = len({**first[0].outputs, **second[0].outputs}) - len(left_out)
        print(f"they agree: losses, {len(first[0].gradients)} gradients and {layers} layers of each step")
        return 0
    print(f"they differ first in {difference}")
    return 1


def _sizes(layout: ParallelLayout) -> str:
    sizes = {axis: getattr(layout, axis) for axis in AXES}
    return ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size and size > 1) or "one process"
