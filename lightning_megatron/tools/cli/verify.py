"""``lightning-megatron verify``: a check of a checkpoint against the manifest of what was written."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from lightning_megatron.tools.cli.common import command_parser, fail

_DESCRIPTION = """\
Compare every file of a checkpoint directory with the manifest, and check that every tensor is covered once and every
parameter has its optimizer state; of a single file, compare its check sums. Needs no device and no model.

exit status: 0 if nothing is wrong; 1 if something is, each fault with its file and its tensors; 2 for wrong
arguments."""


def verify_parser() -> argparse.ArgumentParser:
    """The arguments."""
    parser = command_parser("verify", _DESCRIPTION)
    parser.add_argument("path", metavar="PATH", help="checkpoint directory or file, NAME.ckpt")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, with all tensors of each fault")
    return parser


def verify_command(argv: Sequence[str]) -> int:
    """Run ``lightning-megatron verify`` with these arguments; returns the exit status."""
    args = verify_parser().parse_args(list(argv))
    from lightning_megatron.checkpoint import verify  # imports torch, which --help need not wait for

    if not Path(args.path).exists():
        return fail(f"{args.path}: there is no such directory or file")
    faults = verify(args.path)
    if args.json:
        listed = [{"file": fault.file, "fault": fault.what, "tensors": list(fault.tensors)} for fault in faults]
        print(json.dumps({"path": args.path, "good": not faults, "faults": listed}, indent=1))
    elif faults:
        print(f"{args.path}: damaged")
        print("\n".join(f"  - {fault}" for fault in faults))
    else:
        print(f"{args.path}: good")
    return 1 if faults else 0
