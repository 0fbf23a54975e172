"""Recipe that trains the small twin of a recipe by itself: on a CPU, with random tokens, for a few steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.errors import divisors
from lightning_megatron.tools.parity.recipe import strategy_in, twin_recipe
from lightning_megatron.tools.parity.twin import twin_layout
from lightning_megatron.tools.planning.core.job import PlannedJob
from lightning_megatron.tools.recipes.contents import arguments_of, class_of

MOST = 16
"""Processes of a twin, unless the user says otherwise."""
_AXES = ("dp", "cp", "pp", "tp")
"""Axes that shrink; of equally large ones the first in this order shrinks first."""
_STEPS, _VALIDATION = 10, 5
_ENDS = ("max_epochs", "max_time", "min_steps", "min_epochs", "limit_train_batches", "logger", "plugins")
"""Arguments of the Trainer that set another length of the run, or belong to the recipe's machines."""


def on_cpu(recipe: Mapping[str, Any], job: PlannedJob, folder: Path, most: int = MOST) -> dict[str, Any]:
    """The small twin of a recipe, for a CPU.

    Args:
        job: the job that it describes.
        folder: folder of the run, where its tokens will be.
        most: largest number of processes.
    """
    layout = at_most(twin_layout(job.layout), most)
    found = twin_recipe(recipe, job, folder, layout)
    trainer = {name: value for name, value in found["trainer"].items() if name not in _ENDS}
    precision = str(trainer.get("precision", "32-true"))
    found["trainer"] = trainer | {
        "accelerator": "cpu",
        "devices": layout.world_size,
        "num_nodes": 1,
        "strategy": strategy_in(trainer.get("strategy"), job.layout, layout),
        "precision": "bf16-mixed" if precision == "16-mixed" else precision,
        "max_steps": _STEPS,
        "val_check_interval": _VALIDATION,
        "limit_val_batches": 1,
        "log_every_n_steps": 1,
        "default_root_dir": str(folder),
        "callbacks": [_callback(callback, folder) for callback in trainer.get("callbacks") or []],
    }
    found["data"]["init_args"]["split"] = "8,1,1"
    return {name: part for name, part in found.items() if name not in ("ckpt_path", "cluster")}


def at_most(layout: ParallelLayout, most: int) -> ParallelLayout:
    """Shrink a layout to at most ``most`` ranks: halve the largest axis repeatedly, but keep 2 on every used axis.

    Args:
        layout: a resolved layout.
        most: largest number of ranks; exceeded where 2 on every used axis are more.
    """
    sizes = {axis: int(getattr(layout, axis) or 1) for axis in _AXES}
    while math.prod(sizes.values()) > most and max(sizes.values()) > 2:
        axis = max(_AXES, key=lambda name: sizes[name])
        sizes[axis] = max(each for each in divisors(sizes[axis]) if each <= max(2, sizes[axis] // 2))
        if sizes[axis] == 1:  # the size was a prime number
            sizes[axis] = 2
    ranks = sizes["tp"] * sizes["cp"] * sizes["dp"]
    etp = None if layout.etp in (None, layout.tp) else max(e for e in divisors(sizes["tp"]) if e <= (layout.etp or 1))
    ep = max(each for each in divisors(ranks // (etp or sizes["tp"])) if each <= layout.ep)
    changes: dict[str, Any] = {**sizes, "ep": ep, "etp": etp}
    return replace(layout, **changes).resolve(math.prod(sizes.values()))


def _callback(callback: Any, folder: Path) -> Any:
    """A callback of the recipe, with checkpoints in the twin's folder."""
    if class_of(callback) != "ModelCheckpoint":
        return callback
    arguments = arguments_of(callback) | {"dirpath": str(folder / "checkpoints")}
    if arguments.get("every_n_train_steps"):
        arguments["every_n_train_steps"] = _VALIDATION
    return {**callback, "init_args": arguments}
