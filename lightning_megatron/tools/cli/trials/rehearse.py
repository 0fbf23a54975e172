"""``lightning-megatron rehearse``: memory, traffic and work of single ranks of a job, without its devices."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from lightning.pytorch import LightningDataModule, LightningModule

import lightning_megatron  # noqa: F401 - registers the strategy, and makes modules known by their short names
from lightning_megatron.errors import ConfigError
from lightning_megatron.machine.byte_size import told_bytes
from lightning_megatron.tools.cli.common import command_parser, exit_status
from lightning_megatron.tools.cli.recipes.options import add_recipe, required
from lightning_megatron.tools.cli.training.checkpoint_cli import CheckpointCLI
from lightning_megatron.tools.cli.training.trainer import BriefParser
from lightning_megatron.tools.rehearsal.errors import RehearsalError
from lightning_megatron.tools.rehearsal.known_calls import KnownCalls
from lightning_megatron.tools.rehearsal.rehearse import ranks_that_differ, rehearse
from lightning_megatron.tools.rehearsal.result import Rehearsal

_DESCRIPTION = """Run two steps of single ranks of a job on tensors without memory, in this process.

The real model, optimizer and pipeline schedule of a rank run; no device, data or other process is needed. By
default, one rank of the first, of a middle and of the last pipeline stage are rehearsed."""

_EXAMPLES = """examples:
  lightning-megatron rehearse --recipe mixtral-8x7b
  lightning-megatron rehearse --recipe llama3.1-70b --rank 5 --json
  lightning-megatron rehearse --config a.yaml --config b.yaml --imbalance 1.5 --trainer.num_nodes 4

Further words are those of `lightning-megatron fit`."""


def rehearse_command(argv: Sequence[str]) -> int:
    """Run ``lightning-megatron rehearse`` with these arguments; returns the exit status."""
    options, others = _parser().parse_known_args(argv)
    return exit_status(lambda: _rehearse(options, others), ConfigError, RehearsalError)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("rehearse", _DESCRIPTION, _EXAMPLES, brief_errors=True)
    add_recipe(parser)
    parser.add_argument("--rank", type=int, action="append", help="global rank; may be given several times")
    parser.add_argument("--world-size", type=int, help="ranks of the job; the recipe's by default")
    parser.add_argument(
        "--imbalance", type=float, default=1.0, help="tokens of the rank's experts over the mean of all ranks"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    return parser


def _rehearse(options: argparse.Namespace, others: Sequence[str]) -> int:
    words = [word for path in required(options) for word in ("--config", path)]
    cli = CheckpointCLI(
        LightningModule,
        LightningDataModule,
        parser_class=BriefParser,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_callback=None,
        run=False,
        args=[*words, *others],
    )
    ranks = options.rank or ranks_that_differ(cli.trainer, options.world_size)
    how = {"world_size": options.world_size, "imbalance": options.imbalance, "calls": KnownCalls()}
    found = [rehearse(cli.trainer, cli.model, cli.datamodule, rank=rank, **how) for rank in ranks]
    if options.json:
        print(json.dumps([asdict(each) for each in found], indent=1))
    else:
        print("\n\n".join(_text(each) for each in found))
    return 0


def _text(found: Rehearsal) -> str:
    place = ", ".join(f"{name} {rank} of {size}" for name, (rank, size) in found.coordinates.items())
    layers = f"layers {found.layers[0]} to {found.layers[-1]}" if found.layers else "no layers"
    lines = [f"rank {found.rank} of {found.world_size}{f' ({place})' if place else ''}, {layers}"]
    lines.append(f"{told_bytes(found.peak)} at most: {found.moment}; {told_bytes(found.after_step)} between steps")
    if found.peak_without_pieces < found.peak:
        without = told_bytes(found.peak_without_pieces)
        lines.append(f"{without} at most without the pieces that only a CPU's reduce-scatter receives")
    for cause, size in sorted(found.by_cause.items(), key=lambda item: -item[1]):
        lines.append(f"  {told_bytes(size):>12}  {cause}")
    for axis, kinds in found.traffic.items():
        for kind, amount in kinds.items():
            lines.append(f"  {axis}: {amount.number} x {kind}, {told_bytes(amount.nbytes)}")
    lines.append(f"  {found.flops:.3e} floating-point operations in {sum(found.kernels.values())} kernels")
    return "\n".join([*lines, *(f"  ({note})" for note in found.notes)])
