"""``lightning-megatron ops``: which version of each op a device gets, and why."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from lightning_megatron import device as devices
from lightning_megatron.errors import ConfigError
from lightning_megatron.ops.registry import Ops, op_table

_DESCRIPTION = """\
For every op that devices have versions of: which there are on this machine, which one a model gets, and why. What
modules really chose, and which calls a version could not do, is in op_report.json in the folder of a run's logger.

exit status: 0; 1 if something is required and not there; 2 for wrong arguments."""


def ops_parser() -> argparse.ArgumentParser:
    """The arguments."""
    parser = argparse.ArgumentParser(
        prog="lightning-megatron ops", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=list(devices.KINDS), help="kind of device (default: the best there is)")
    parser.add_argument(
        "--ops", metavar="NAME=MODE,...", help="as MegatronStrategy(ops=...): auto, require, off, or a variant"
    )
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    return parser


def ops_command(argv: Sequence[str]) -> int:
    """Run ``lightning-megatron ops`` with these arguments; returns the exit status."""
    args = ops_parser().parse_args(list(argv))
    try:
        ops = Ops(args.device or devices.best_available().type, args.ops)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows = op_table(ops)
    print(json.dumps({"device": ops.device, "ops": rows}, indent=1) if args.json else _table(ops, rows))
    return 1 if any(row["chosen"] is None for row in rows) else 0


def _table(ops: Ops, rows: Sequence[dict[str, Any]]) -> str:
    lines = [("op", "mode", "chosen", "why")]
    lines += [(row["op"], row["mode"], row["chosen"] or "nothing", row["why"]) for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    text = [f"device: {ops.device}", ""]
    for line, row in zip(lines, [None, *rows], strict=True):
        text.append("  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[3]]))
        if row is not None:
            text += [f"    - {candidate}" for candidate in [*row["candidates"], "reference"]]
            text += [f"    ({row['op']}={variant})" for variant in row["variants"]]
    return "\n".join(text)
