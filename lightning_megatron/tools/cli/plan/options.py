"""Arguments of ``lightning-megatron plan``."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace

from lightning_megatron.config.layout import CP_COMM_TYPES
from lightning_megatron.errors import Problem, raise_if_any
from lightning_megatron.pipeline.schedule import SCHEDULE_NAMES
from lightning_megatron.tools.cli.common import command_parser, size_in_bytes
from lightning_megatron.tools.cli.recipes.options import add_recipe
from lightning_megatron.tools.planning.core.device_file import DeviceSpec, device_names
from lightning_megatron.tools.planning.core.job import PRECISIONS

_SIZES = ("tp", "pp", "cp", "ep", "etp", "vpp", "micro_batch_size")
FIXED = (*_SIZES, "recompute", "cp_comm_type", "pipeline_schedule")
"""Arguments of the strategy that the command line can fix in a search."""
_NAMED = ("device", "devices", "seq_length", "global_batch_size", "precision", "max_memory", *FIXED)
OPTIONS = {name: f"--{name.replace('_', '-')}" for name in _NAMED} | {"num_devices": "--devices"}
"""Options by the arguments that they give."""
_LINKS = ("within", "between")

_EXAMPLES = """examples:
  lightning-megatron plan --model llama3.1-70b --devices 64 --device h100 --seq-length 8192 --global-batch-size 2048
  lightning-megatron plan --recipe llama3.1-8b --device gaudi2
"""


def plan_parser() -> argparse.ArgumentParser:
    """The arguments."""
    description = (
        "Find the fastest layouts that fit for a model and devices, or judge the layout of a recipe.\n"
        "Exit status: 0 it fits, 1 it does not fit, 2 arguments that cannot work."
    )
    parser = command_parser("plan", description, _EXAMPLES, brief_errors=True)
    add = parser.add_argument
    add("--model", metavar="PRESET|PATH", help="name of a preset, or a Hugging Face directory or config.json")
    add_recipe(parser, "judge the layout of this recipe; several as with fit")
    add("--devices", type=int, metavar="N", help="devices of the job")
    add("--device", metavar="NAME|FILE", help=f"{', '.join(device_names())}, or a device file")
    add("--seq-length", type=int, metavar="TOKENS", help="tokens of a sample")
    add("--global-batch-size", type=int, metavar="SAMPLES", help="samples of one optimizer step, over all replicas")
    precisions = f"{', '.join(PRECISIONS)} (default: the recipe's, else bf16-mixed)"
    add("--precision", choices=PRECISIONS, metavar="NAME", help=precisions)
    add("--fp8", action="store_true", help="linear layers multiply in fp8")
    add("--attention", choices=("flash", "reference"), help="reference stores the scores (default flash)")
    add("--max-memory", type=size_in_bytes, metavar="80GB", help="memory for tensors of a rank")
    add(
        "--link",
        action="append",
        default=[],
        metavar="between=50GB",
        help="bytes a second of one device's link, within a node or between nodes",
    )
    for name in _SIZES:
        add(f"--{name.replace('_', '-')}", type=int, metavar="N", help="a size to keep")
    add("--recompute", choices=("selective", "full", "moe", "mlp"), help="recomputation to keep")
    add("--cp-comm-type", choices=CP_COMM_TYPES, help="communication of context parallelism to keep")
    add("--pipeline-schedule", choices=SCHEDULE_NAMES, metavar="NAME", help=f"to keep: {', '.join(SCHEDULE_NAMES)}")
    add("--top", type=_count, default=3, metavar="N", help="number of layouts to print (default 3)")
    add("--explain", action="store_true", help="print the formula of every term of the best layout")
    add("--json", action="store_true", help="print JSON")
    add("--yaml", nargs="?", const="-", metavar="FILE", help="write the best layout as a recipe (default: print it)")
    add("--png", metavar="FILE", help="draw memory and scaling; needs matplotlib")
    add("--check", action="store_true", help="rehearse the fullest rank of the best layout, and compare; needs torch")
    add("--calibrate", metavar="FILE", help="measure the device at hand, and write a device file; needs torch")
    return parser


def _count(text: str) -> int:
    count = int(text) if text.isdigit() else 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of layouts")
    return count


def with_link(device: DeviceSpec, links: list[str]) -> DeviceSpec:
    """A device with other bandwidths.

    Args:
        links: texts such as ``between=50GB``.

    Raises:
        ConfigError: for every text that cannot be read.
    """
    found: list[Problem] = []
    for given in links:
        name, _, size = given.partition("=")
        try:
            bandwidth = size_in_bytes(re.sub(r"/s$", "", size))
        except argparse.ArgumentTypeError as error:
            found.append(Problem("--link", given, str(error), ("between=50GB",)))
            continue
        if name not in _LINKS:
            found.append(Problem("--link", given, "unknown link", tuple(f"{known}={size}" for known in _LINKS)))
            continue
        if name == "within":
            device = replace(device, within_node=replace(device.within_node, bandwidth=float(bandwidth)))
        else:
            device = replace(device, between_nodes=replace(device.between_nodes, bandwidth=float(bandwidth)))
    raise_if_any(found)
    return device
