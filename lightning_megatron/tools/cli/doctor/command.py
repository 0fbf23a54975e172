"""``lightning-megatron doctor``: a check of the installed software, and of the devices that a Trainer would use."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_megatron.machine import gaudi
from lightning_megatron.machine.finding import Finding
from lightning_megatron.tools.cli.common import command_parser, fail

_DESCRIPTION = """\
Check this machine before training on it: versions, the torch that Gaudi's software was built for, the driver,
switches in the environment, shared memory and the limit of open files. Nothing is changed.

--device also tries the devices that a Trainer would use, in processes of their own with a time limit: a product, every
op that has an implementation for the device against its reference (bf16 and fp32, forward and gradients), collectives
of two devices. It writes a report. On a machine without an accelerator it tries the CPU.

exit status: 0 if nothing is wrong, notes or not; 1 if something is; 2 for wrong arguments."""
_REPORT = Path("lightning-megatron-doctor.json")


def doctor_parser() -> argparse.ArgumentParser:
    """The arguments."""
    parser = command_parser("doctor", _DESCRIPTION)
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="ranks of the planned job (default: 1)")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--device", action="store_true", help="try the devices as well, and write a report")
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE.json",
        help=f"report as JSON, and as text beside it (.txt); default with --device: {_REPORT}",
    )
    parser.add_argument(
        "--limit", type=float, default=300.0, metavar="SECONDS", help="time limit of a trial on a device (default: 300)"
    )
    parser.add_argument(
        "--tokens", type=int, default=1024, metavar="N", help="length of the sequence in trials of ops (default: 1024)"
    )
    return parser


def doctor_command(argv: Sequence[str]) -> int:
    """Run ``lightning-megatron doctor`` with these arguments; returns the exit status."""
    args = doctor_parser().parse_args(list(argv))
    for name in ("tokens", "limit", "ranks"):
        if getattr(args, name) <= 0:
            return fail(f"--{name} must be positive, not {getattr(args, name)}")
    with gaudi.without_autoload():  # a bridge that does not fit would end `import torch`
        from lightning_megatron.tools.cli.doctor.findings import findings
    found = findings(args.ranks)
    if args.device:
        from lightning_megatron.tools.cli.doctor.trials import trials

        found += trials(args.tokens, args.limit)
    rows = [{**asdict(finding), "verdict": finding.verdict} for finding in found]
    text = "\n".join(_lines(found))
    print(json.dumps(rows, indent=1) if args.json else text)
    path = args.report or (_REPORT if args.device else None)
    if path is not None:
        try:
            _write(path, rows, text)
        except OSError as error:
            return fail(f"the report cannot be written: {error}")
        if not args.json:
            print(f"report: {path} and {path.with_suffix('.txt')}")
    return int(any(finding.verdict == "wrong" for finding in found))


def _write(path: Path, rows: list[dict[str, Any]], text: str) -> None:
    path.write_text(json.dumps(rows, indent=1) + "\n")
    path.with_suffix(".txt").write_text(text + "\n")


def _lines(found: Sequence[Finding]) -> list[str]:
    width = max(len(finding.subject) for finding in found)
    lines = []
    for finding in found:
        lines.append(f"{finding.verdict:<6}{finding.subject:<{width}}  {finding.value}")
        if finding.fault:
            lines.append(f"{'':<6}{'':<{width}}  -> {finding.fault}")
    return lines
