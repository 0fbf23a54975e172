"""``lightning-megatron plan``: the fastest layouts that fit, or the verdict on the layout of a recipe."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning_megatron.errors import ConfigError, Problem, raise_if_any
from lightning_megatron.tools.cli.common import exit_status, named_by_options
from lightning_megatron.tools.cli.plan import text
from lightning_megatron.tools.cli.plan.options import FIXED, OPTIONS, plan_parser, with_link
from lightning_megatron.tools.planning.core.device_file import DeviceSpec, device_names, load_device
from lightning_megatron.tools.planning.plan import Plan, plan_of
from lightning_megatron.tools.planning.settings import layout_words


def plan_command(argv: Sequence[str]) -> int:
    """Run ``lightning-megatron plan`` with these arguments; returns the exit status."""
    args = plan_parser().parse_args(list(argv))
    return exit_status(lambda: _run(args), ConfigError, ImportError, OSError, text=partial(named_by_options, OPTIONS))


def _run(args: argparse.Namespace) -> int:
    if args.calibrate:
        return _calibrate(args.calibrate)
    return _judge(args) if args.config else _search(args)


def _calibrate(path: str) -> int:
    """Measure the device at hand, and write its file."""
    from lightning_megatron.tools.calibration import calibrate

    device = calibrate(path)
    rates = ", ".join(f"{dtype} {device.peak(dtype) / 1e12:.3g} TFLOP/s" for dtype in device.flops)
    print(f"{device.title}: {rates}; `--device {path}` plans with it")
    return 0


# A search


def _search(args: argparse.Namespace) -> int:
    from lightning_megatron.tools.cli.recipes.model import model_of
    from lightning_megatron.tools.planning.request import PlanRequest
    from lightning_megatron.tools.planning.search import search

    needed = ("model", "devices", "device", "seq_length", "global_batch_size")
    raise_if_any(
        Problem(f"--{name.replace('_', '-')}", None, "is needed for a search; or give a recipe with --config")
        for name in needed
        if getattr(args, name) is None
    )
    found: list[Problem] = []
    config, device = _of(found, model_of, args.model), _of(found, _device, args)
    raise_if_any(found)
    assert config is not None
    request = PlanRequest(
        config,
        device,
        args.devices,
        args.seq_length,
        args.global_batch_size,
        args.precision or "bf16-mixed",
        args.fp8,
        args.attention or "flash",
        args.max_memory,
        {name: getattr(args, name) for name in FIXED if getattr(args, name) is not None},
    )
    result = search(request, args.top)
    plans = list(result.plans)
    if args.json:
        closest = None if result.closest is None else text.as_data(result.closest, device)
        print(json.dumps({"plans": [text.as_data(plan, device) for plan in plans], "closest": closest}, indent=2))
    else:
        print(text.heading(request, args.model))
        print("\n".join(text.found_text(result, request)))
    if args.png and plans:
        from lightning_megatron.tools.cli.plan.picture import draw, scaling

        draw(plans, list(scaling(request)), args.png, text.heading(request, args.model))
    if plans:
        _about(args, plans[0], device)
    return 0 if plans else 1


def _of(found: list[Problem], function: Any, *args: object) -> Any:
    """A function's result; ``None`` if it raises, with its problems added to ``found``."""
    try:
        return function(*args)
    except ConfigError as error:
        found += error.problems
        return None


def _device(args: argparse.Namespace) -> DeviceSpec | None:
    """The device, with the links of the command line; ``None`` if none is named."""
    return None if args.device is None else with_link(load_device(args.device), args.link)


# A verdict


def _judge(args: argparse.Namespace) -> int:
    from lightning_megatron.tools.cli.recipes.job import Given, read_recipe
    from lightning_megatron.tools.cli.recipes.model import model_of
    from lightning_megatron.tools.planning.ways_out import ways_out

    found: list[Problem] = []
    if args.device is None and args.max_memory is None:
        reason = "is needed to know the memory there is; or give --max-memory"
        found.append(Problem("--device", None, reason, tuple(device_names())))
    device = _of(found, _device, args)
    config = _of(found, model_of, args.model) if args.model else None
    given = Given(args.devices, args.seq_length, args.global_batch_size, args.precision, config)
    job = _of(found, read_recipe, args.config, given)
    raise_if_any(found)
    if args.attention:
        job = replace(job, attention=args.attention)
    limit = args.max_memory or (0 if device is None else device.usable_bytes)
    plan = plan_of(job, limit, device)
    ways = [] if plan.fits else ways_out(job, limit, device)
    if args.json:
        told = {
            **text.as_data(plan, device),
            "ways_out": [{"changes": way.changes, **text.as_data(way.plan, device)} for way in ways],
        }
        print(json.dumps(told, indent=2))
    else:
        print("\n".join(text.verdict(plan, ways, device)))
    if args.png:
        from lightning_megatron.tools.cli.plan.picture import draw

        draw([plan, *(way.plan for way in ways)], [], args.png, " ".join(args.config))
    _about(args, plan if plan.fits or not ways else ways[0].plan, device)
    return 0 if plan.fits else 1


def _about(args: argparse.Namespace, plan: Plan, device: DeviceSpec | None) -> None:
    """Print or write what else was requested of the best plan: its formulas, its recipe, its rehearsal."""
    if args.explain:
        print("\n" + "\n".join(text.explained(plan)))
    if args.yaml:
        recipe = text.recipe_text(plan.job, 8 if device is None else device.devices_per_node)
        if args.yaml == "-":
            print("\n" + recipe, end="")
        else:
            Path(args.yaml).write_text(recipe)
    if args.check:
        print("\n" + "\n".join(_side_by_side(plan)))


def _side_by_side(plan: Plan) -> list[str]:
    """Memory by formula beside that of a rehearsal, by cause; both of a CPU, whose kernels a rehearsal runs."""
    from lightning_megatron.tools.planning.memory.causes import COMMON, by_common_cause
    from lightning_megatron.tools.planning.memory.peak import memory_of
    from lightning_megatron.tools.planning.memory.shapes import HOST
    from lightning_megatron.tools.rehearsal.errors import RehearsalError
    from lightning_megatron.tools.rehearsal.rehearse import rehearse_job

    formula = memory_of(plan.job, plan.pipeline_rank, HOST)
    try:
        report = rehearse_job(plan.job, plan.pipeline_rank)
    except RehearsalError as error:
        raise ConfigError([Problem("--check", layout_words(plan.job), f"cannot be rehearsed: {error}")]) from None
    ours, theirs = by_common_cause(formula.by_cause), by_common_cause(report.by_cause)
    told = [cause for cause in COMMON if cause in ours or cause in theirs]
    rows = [(cause, ours.get(cause, 0), theirs.get(cause, 0)) for cause in told]
    rows.append(("peak", formula.peak, report.peak))
    return [
        f"{'GiB, with the kernels of a CPU':<44}{'formula':>10}{'rehearsed':>11}",
        *(f"{name:<44}{one / text.GIB:>10.3f}{other / text.GIB:>11.3f}" for name, one, other in rows),
        f"rehearsed {report.moment}: "
        + text.by_cause({name: size / text.GIB for name, size in report.by_cause.items()}),
    ]
