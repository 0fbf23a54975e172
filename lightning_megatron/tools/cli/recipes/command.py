"""``lightning-megatron recipes``: the recipes of this package, or the text of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.errors import ConfigError
from lightning_megatron.families import DEFAULT_PRESETS
from lightning_megatron.models.presets import configuration
from lightning_megatron.tools.cli.common import command_parser, exit_status
from lightning_megatron.tools.recipes.contents import arguments_of, class_of, contents_of, mapping_of
from lightning_megatron.tools.recipes.names import recipe_files, recipe_names

_AXES = ("dp", "tp", "pp", "vpp", "cp", "ep", "etp")
_DESCRIPTION = """List the recipes that `fit` and other commands take by name, or print one."""

_EXAMPLES = """examples:
  lightning-megatron recipes
  lightning-megatron recipes llama2-70b > mine.yaml"""


@dataclass(frozen=True)
class Summary:
    """Sizes of a recipe.

    Attributes:
        name: its name.
        parameters: parameters of the model.
        devices: devices of the job.
        layout: resolved layout.
        seq_length: tokens of a sample.
        samples: samples of an optimizer step.
    """

    name: str
    parameters: int
    devices: int
    layout: ParallelLayout
    seq_length: int
    samples: int

    @property
    def axes(self) -> str:
        """Axes of more than one rank, such as ``dp 4 x tp 2``."""
        sizes = {"dp": self.layout.data_parallel_size} | {axis: getattr(self.layout, axis) for axis in _AXES[1:]}
        sizes["etp"] = None if self.layout.etp == self.layout.tp else self.layout.etp
        told = [f"{axis} {size}" for axis, size in sizes.items() if size and (size > 1 or axis == "etp")]
        return " x ".join(told) or "one process"


def recipes_command(argv: Sequence[str]) -> int:
    """Run ``lightning-megatron recipes`` with these arguments; returns the exit status."""
    parser = command_parser("recipes", _DESCRIPTION, _EXAMPLES, brief_errors=True)
    parser.add_argument("name", nargs="?", help="the recipe to print")
    name = parser.parse_args(list(argv)).name
    return exit_status(lambda: _list() if name is None else _print(name), ConfigError)


def summary_of(name: str) -> Summary:
    """Sizes of a recipe of this package."""
    recipe = contents_of(recipe_files(name))
    trainer, data = recipe["trainer"], arguments_of(recipe["data"])
    devices = int(trainer["devices"]) * int(trainer.get("num_nodes") or 1)
    given = arguments_of(trainer["strategy"])
    layout = ParallelLayout(**{axis: given[axis] for axis in _AXES if axis in given}).resolve(devices)
    batch = int(data.get("batch_size") or 1) * int(trainer.get("accumulate_grad_batches") or 1)
    samples = int(data.get("global_batch_size") or batch * layout.data_parallel_size)
    return Summary(name, _parameters(recipe["model"]), devices, layout, int(data["seq_length"]), samples)


def _parameters(model: Mapping[str, Any]) -> int:
    shape = arguments_of(model).get("config") or DEFAULT_PRESETS[class_of(model)]
    return int(configuration(shape, **mapping_of(model, "dict_kwargs")).num_parameters())


def _list() -> int:
    rows = [("name", "parameters", "devices", "layout", "tokens", "samples a step")]
    for each in map(summary_of, recipe_names()):
        size = f"{each.parameters / 1e9:.1f}B" if each.parameters >= 1e9 else f"{each.parameters / 1e6:.1f}M"
        rows.append((each.name, size, str(each.devices), each.axes, str(each.seq_length), str(each.samples)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if number in (0, 3) else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
    return 0


def _print(name: str) -> int:
    files = recipe_files(name)
    if len(files) == 1:
        print(files[0].read_text(), end="")
        return 0
    import yaml

    changes = files[-1].read_text().splitlines()[0].removeprefix("# ")
    print(f"# {changes}\n{yaml.safe_dump(contents_of(files), sort_keys=False)}", end="")
    return 0
