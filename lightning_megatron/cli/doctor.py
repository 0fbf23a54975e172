"""``lightning-megatron doctor``: a check of the installed software, and of the devices that a Trainer would use."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from platform import python_version

import torch

from lightning_megatron import device as devices
from lightning_megatron.cli.common import command_parser
from lightning_megatron.machine import gaudi, host
from lightning_megatron.machine.finding import Finding

_DESCRIPTION = """\
Look at this machine before training on it: versions, the table of which Gaudi software goes with which torch, the
driver, switches in the environment, shared memory and the limit of open files. Nothing is changed.

exit status: 0 if nothing is wrong, notes or not; 1 if something is; 2 for wrong arguments."""

_ARCHIVED_UNTIL = (2, 5, 5)
"""The newest Lightning on which Intel's archived plugin can be imported."""


def doctor_parser() -> argparse.ArgumentParser:
    """The arguments."""
    parser = command_parser("doctor", _DESCRIPTION)
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="of the job that is planned (default: 1)")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    return parser


def doctor_command(argv: Sequence[str]) -> int:
    """Run ``lightning-megatron doctor`` with these arguments; returns the exit status."""
    args = doctor_parser().parse_args(list(argv))
    found = findings(args.ranks)
    if args.json:
        print(json.dumps([{**asdict(finding), "verdict": finding.verdict} for finding in found], indent=1))
    else:
        print("\n".join(_lines(found)))
    return int(any(finding.verdict == "wrong" for finding in found))


def findings(ranks: int) -> list[Finding]:
    """All findings, for a job of so many ranks."""
    return [
        Finding("Python", python_version()),
        Finding("lightning-megatron", gaudi.installed("lightning-megatron") or "not installed"),
        _torch(),
        *_lightning(),
        gaudi.software(torch.__version__),
        *gaudi.driver(),
        _taken(),
        *gaudi.environment(),
        host.shared_memory(),
        host.open_files(ranks),
    ]


def _torch() -> Finding:
    oldest = ".".join(map(str, gaudi.OLDEST_TORCH))
    here = tuple(int(part) for part in gaudi.minor(torch.__version__).split("."))
    return Finding("torch", torch.__version__, "" if here >= gaudi.OLDEST_TORCH else f"{oldest} or newer is needed")


def _lightning() -> list[Finding]:
    lightning, archived = gaudi.installed("lightning"), gaudi.installed("lightning-habana")
    if lightning is None:
        return [Finding("Lightning", "not installed", "install lightning >= 2.5")]
    found = [Finding("Lightning", lightning)]
    if archived is not None:
        here = tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in lightning.split(".")[:3])
        newest = ".".join(map(str, _ARCHIVED_UNTIL))
        fault = f"cannot be imported on a Lightning newer than {newest}; nothing here needs it"
        found.append(Finding("lightning-habana", archived, fault if here > _ARCHIVED_UNTIL else "", harmful=False))
    return found


def _taken() -> Finding:
    kind = devices.best_available()
    count = devices.device_count(kind)
    return Finding("a Trainer takes", f"{kind.type}, {count} {'device' if count == 1 else 'devices'} here")


def _lines(found: Sequence[Finding]) -> list[str]:
    width = max(len(finding.subject) for finding in found)
    lines = []
    for finding in found:
        lines.append(f"{finding.verdict:<6}{finding.subject:<{width}}  {finding.value}")
        if finding.fault:
            lines.append(f"{'':<6}{'':<{width}}  -> {finding.fault}")
    return lines
