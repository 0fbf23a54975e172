"""``lightning-megatron why``: the rank that hung or died first, and its last action."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from lightning_megatron.recorder.diagnosis import diagnose
from lightning_megatron.recorder.reading import read_run, runs_below
from lightning_megatron.recorder.table import as_json, last_actions, render
from lightning_megatron.tools.cli.common import command_parser, fail

_DESCRIPTION = """\
Read the last actions of every rank of a run that hangs, or that has ended badly, and print the rank at fault first.
Works on a job of which every process was killed, and on one that still runs.

exit status: 0 if a rank stands out; 1 if none does; 2 where there is no record of a run."""


def why_parser() -> argparse.ArgumentParser:
    """The arguments."""
    parser = command_parser("why", _DESCRIPTION)
    parser.add_argument("path", metavar="RUN_DIR", help="default_root_dir of the Trainer, or a folder in its .actions")
    parser.add_argument("--last", type=int, default=0, metavar="N", help="print the last N actions of each rank, too")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def why_command(argv: Sequence[str]) -> int:
    """Run ``lightning-megatron why`` with these arguments; returns the exit status."""
    args = why_parser().parse_args(list(argv))
    runs = runs_below(Path(args.path)) if Path(args.path).is_dir() else []
    views = read_run(runs[0]) if runs else []
    if not views:
        found = "no record of a run that hangs or has ended badly" if Path(args.path).is_dir() else "no such directory"
        return fail(f"{args.path}: there is {found}; runs that end well leave none")
    diagnosis = diagnose(views)
    # For a run that is over, times are relative to its last sign of life.
    now = time.time_ns() if any(view.is_alive for view in views) else max(max(v.active, v.beat) for v in views)
    if args.json:
        print(json.dumps({"run": str(runs[0]), **as_json(views, diagnosis, args.last)}, indent=1))
    else:
        others = f" ({len(runs) - 1} older beside it)" if len(runs) > 1 else ""
        print(f"{runs[0]}{others}\n{render(views, diagnosis, now)}")
        for view in views if args.last > 0 else ():
            print(last_actions(view, args.last))
    return 0 if diagnosis.culprits else 1
