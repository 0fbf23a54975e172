"""``lightning-megatron ops``: the implementation of each op on a device, with the reason."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from lightning_megatron.errors import ConfigError, Problem, nearest_names
from lightning_megatron.tools.cli.common import command_parser, exit_status

_DESCRIPTION = """\
List every op with device implementations: those on this machine, the one that a model gets, and the reason. The
choices of a run's modules, and the calls that an implementation did not support, are in op_report.json in the log
folder of the run.

exit status: 0; 1 if something is required and not available; 2 for wrong arguments."""


def ops_parser() -> argparse.ArgumentParser:
    """The arguments."""
    parser = command_parser("ops", _DESCRIPTION)
    parser.add_argument("--device", metavar="TYPE", help="kind of device (default: the best there is)")
    parser.add_argument(
        "--ops", metavar="NAME=MODE,...", help="as MegatronStrategy(ops=...): auto, require, off, or a variant"
    )
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    return parser


def ops_command(argv: Sequence[str]) -> int:
    """Run ``lightning-megatron ops`` with these arguments; returns the exit status."""
    args = ops_parser().parse_args(list(argv))
    return exit_status(lambda: _run(args), ConfigError)


def _run(args: argparse.Namespace) -> int:
    from lightning_megatron import device as devices  # imports torch, which --help need not wait for
    from lightning_megatron.ops.registry import Ops, op_table

    if args.device is not None and args.device not in devices.KINDS:
        near = nearest_names(args.device, list(devices.KINDS))
        raise ConfigError([Problem("--device", args.device, "unknown kind of device", near)])
    ops = Ops(args.device or devices.best_available().type, args.ops)
    rows = op_table(ops)
    print(json.dumps({"device": ops.device, "ops": rows}, indent=1) if args.json else _table(str(ops.device), rows))
    return 1 if any(row["chosen"] is None for row in rows) else 0


def _table(device: str, rows: Sequence[dict[str, Any]]) -> str:
    lines = [("op", "mode", "chosen", "why")]
    lines += [(row["op"], row["mode"], row["chosen"] or "nothing", row["why"]) for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    text = [f"device: {device}", ""]
    for line, row in zip(lines, [None, *rows], strict=True):
        text.append("  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[3]]))
        if row is not None:
            text += [f"    - {candidate}" for candidate in [*row["candidates"], "reference"]]
            text += [f"    ({row['op']}={variant})" for variant in row["variants"]]
    return "\n".join(text)
