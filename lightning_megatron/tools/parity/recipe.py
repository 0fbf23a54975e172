"""Recipes of the runs that are compared: a small twin of a recipe, and a recipe in another layout."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.transformer import SMALL_VOCABULARY
from lightning_megatron.errors import ConfigError, Problem
from lightning_megatron.pipeline.partition import LayerSplit
from lightning_megatron.tools.parity.twin import twin_micro_batches, twin_seq_length
from lightning_megatron.tools.planning.core.job import PlannedJob
from lightning_megatron.tools.planning.settings import SPLIT_ARGUMENTS
from lightning_megatron.tools.recipes.contents import arguments_of, class_of

AXES = ("tp", "pp", "cp", "ep", "etp", "vpp", "dp")
DATA = "MegatronDataModule"
_DOCUMENTS, _LENGTH = 64, 400
"""Random documents of a twin, and tokens of each."""
_STRATEGY = "lightning_megatron.MegatronStrategy"
_OF_THE_DEVICE = ("compile", "ops", "fp8", "max_memory", "async_save", "gpu_migration", "record_actions")
"""Arguments of the strategy that belong to the recipe's device, or do not change the numbers of a training."""
_KEPT = ("gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches")
"""Arguments of the Trainer that change the numbers of a training."""


@dataclass(frozen=True)
class Settings:
    """Settings that both runs share.

    Attributes:
        steps: optimizer steps.
        precision: Lightning's name.
        accelerator: Lightning's name.
    """

    steps: int = 3
    precision: str = "32-true"
    accelerator: str = "cpu"


def layout_of(recipe: Mapping[str, Any]) -> ParallelLayout:
    """Layout of a recipe with any module.

    Raises:
        ConfigError: if the number of devices is not given.
    """
    trainer = recipe.get("trainer") or {}
    given, devices = arguments_of(trainer.get("strategy")), trainer.get("devices")
    if not isinstance(devices, int):
        raise ConfigError([Problem("trainer.devices", devices, "the number of devices must be given", (1,))])
    layout = ParallelLayout(
        **{name: given[name] for name in (*AXES, "sequence_parallel", "cp_comm_type") if name in given}
    )
    return layout.resolve(devices * int(trainer.get("num_nodes") or 1))


def twin_recipe(recipe: Mapping[str, Any], job: PlannedJob, folder: Path, layout: ParallelLayout) -> dict[str, Any]:
    """Recipe of the small twin, which reads its tokens from ``folder``.

    Args:
        job: the job that it describes.
        folder: folder of the data.
        layout: layout of the twin, resolved.

    Raises:
        ConfigError: if the recipe's settings do not go with the small model.
    """
    length = twin_seq_length(layout)
    config = job.config.small(layout, length)
    small = replace(  # checks itself
        job,
        config=config,
        layout=layout,
        split=LayerSplit(),
        micro_batch_size=1,
        num_micro_batches=twin_micro_batches(layout),
        seq_length=length,
    )
    found = copy.deepcopy(dict(recipe))
    model = found["model"]
    fields = json.loads(json.dumps(asdict(config)))  # tuples as lists, for YAML
    found["model"] = {
        "class_path": model["class_path"] if isinstance(model, Mapping) else model,
        "init_args": {"config": fields, "lr": 1e-3, "lr_schedule": "constant"},
    }
    found["data"] = {
        "class_path": DATA,
        "init_args": {
            "data_path": str(folder / "tokens"),
            "seq_length": length,
            "split": "1,0,0",
            "batch_size": small.micro_batch_size * small.num_micro_batches,
        },
    }
    strategy = found["trainer"]["strategy"]
    if isinstance(strategy, dict):
        strategy["init_args"] = _without_split(arguments_of(strategy)) | {"micro_batch_size": 1}
    return found


def write_tokens(prefix: Path) -> None:
    """Write the random tokens of every twin."""
    import numpy as np

    from lightning_megatron.data import IndexedDatasetWriter

    draw = np.random.default_rng(0)
    with IndexedDatasetWriter(str(prefix), np.dtype(np.int32)) as writer:
        for _ in range(_DOCUMENTS):
            writer.add_document(draw.integers(0, SMALL_VOCABULARY, _LENGTH, dtype=np.int32), [_LENGTH])


def in_layout(
    recipe: Mapping[str, Any], own: ParallelLayout, layout: ParallelLayout, settings: Settings
) -> dict[str, Any]:
    """The recipe in another layout, for a few steps without checkpoints.

    Args:
        own: layout that it is written for.
        layout: layout to run; both resolved.
        settings: settings of both runs.

    Raises:
        ConfigError: if the samples of a step do not split over the replicas.
    """
    found = copy.deepcopy(dict(recipe))
    trainer = found.get("trainer") or {}
    found["trainer"] = {name: trainer[name] for name in _KEPT if name in trainer} | {
        "strategy": strategy_in(trainer.get("strategy"), own, layout),
        "accelerator": settings.accelerator,
        "devices": layout.world_size,
        "max_steps": settings.steps,
        "precision": settings.precision,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    if class_of(found.get("data")) == DATA:
        found["data"]["init_args"] = _data_arguments(found["data"], own, layout)
    found.pop("ckpt_path", None)
    return found


def strategy_in(part: object, own: ParallelLayout, layout: ParallelLayout) -> dict[str, Any]:
    """A recipe's strategy in another layout, without the arguments for the recipe's device.

    Args:
        part: strategy of the recipe; a name of Lightning's registry stands for :class:`MegatronStrategy`.
        own: layout that it is written for.
        layout: layout to run; both resolved.
    """
    kind = str(part["class_path"]) if isinstance(part, Mapping) else _STRATEGY
    return {"class_path": kind, "init_args": _strategy_arguments(part, own, layout)}


def _without_split(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a strategy without those that assign layers to stages."""
    return {name: value for name, value in arguments.items() if name not in SPLIT_ARGUMENTS}


def _strategy_arguments(part: object, own: ParallelLayout, layout: ParallelLayout) -> dict[str, Any]:
    arguments = {name: value for name, value in arguments_of(part).items() if name not in _OF_THE_DEVICE}
    arguments |= {axis: getattr(layout, axis) for axis in AXES if axis != "dp"}
    arguments["sequence_parallel"] = layout.sequence_parallel
    if (layout.pp, layout.vpp) != (own.pp, own.vpp):
        arguments = _without_split(arguments)
    if layout.pp == 1:
        arguments.pop("pipeline_schedule", None)
    return arguments


def _data_arguments(part: object, own: ParallelLayout, layout: ParallelLayout) -> dict[str, Any]:
    """The same samples in a step, split over other replicas."""
    arguments = arguments_of(part)
    if arguments.get("global_batch_size") is not None:
        return arguments
    samples = int(arguments.get("batch_size", 1)) * own.data_parallel_size
    size, left = divmod(samples, layout.data_parallel_size)
    if left:
        reason = f"the {samples} samples of a step do not split over so many replicas"
        raise ConfigError([Problem("dp", layout.dp, reason, (own.dp,))])
    return arguments | {"batch_size": size}
