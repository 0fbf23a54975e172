"""Training jobs from YAML recipes, read without Lightning and torch.

Only keys that memory and time depend on are read; ``fit`` checks the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import ConfigError, Problem, is_whole, nearest_names, raise_if_any
from lightning_megatron.families import DEFAULT_PRESETS
from lightning_megatron.models.presets import configuration
from lightning_megatron.tools.cli.recipes.model import decoder
from lightning_megatron.tools.planning.core.job import PRECISIONS, PlannedJob
from lightning_megatron.tools.planning.settings import Feed, job_of
from lightning_megatron.tools.recipes.contents import arguments_of, class_of, contents_of, mapping_of

STRATEGIES = ("MegatronStrategy", "MegatronHPUStrategy", "megatron", "megatron_hpu")
DATA = "MegatronDataModule"
DEFAULT_PRECISION = "32-true"
"""Lightning's own."""


@dataclass(frozen=True)
class Given:
    """Values of the command line that replace those of a recipe; ``None`` for those that do not.

    Attributes:
        devices: devices of the job.
        seq_length: tokens of a sample.
        global_batch_size: samples of one optimizer step.
        precision: precision by Lightning's name.
        config: shape of the model.
    """

    devices: int | None = None
    seq_length: int | None = None
    global_batch_size: int | None = None
    precision: str | None = None
    config: TransformerConfig | None = None


def read_recipe(paths: Sequence[str], given: Given) -> PlannedJob:
    """The job of one recipe, or of several, of which later ones override earlier ones, as with ``fit``.

    Args:
        paths: YAML files.
        given: values that replace those of the files.

    Raises:
        ConfigError: with every key that is missing or cannot be planned with.
    """
    recipe = contents_of(paths)
    trainer = mapping_of(recipe, "trainer")
    found: list[Problem] = []
    arguments = _strategy(trainer, found)
    devices = given.devices or _devices(trainer, found)
    config = given.config or recipe_shape(recipe, found)
    data = arguments_of(recipe.get("data"))
    seq_length = given.seq_length or data.get("seq_length")
    if not is_whole(seq_length, at_least=1):
        found.append(Problem("data.init_args.seq_length", seq_length, f"not known: use {DATA}, or give --seq-length"))
    precision = given.precision or str(trainer.get("precision", DEFAULT_PRECISION))
    if precision not in PRECISIONS:
        found.append(Problem("trainer.precision", precision, "unknown", nearest_names(precision, PRECISIONS)))
    raise_if_any(found)
    assert config is not None
    assert isinstance(seq_length, int)
    accumulated = trainer.get("accumulate_grad_batches") or 1
    batch_size, whole = data.get("batch_size", 1), given.global_batch_size or data.get("global_batch_size")
    if whole is not None:
        batch_size = _batch_size(whole, devices, arguments, accumulated)
    feed = Feed(devices, seq_length, batch_size, accumulated, precision)
    return job_of(decoder("model", config), feed, arguments, **op_choices(arguments.get("ops")))


def op_choices(modes: object) -> dict[str, Any]:
    """Fields of a planned job that follow from the strategy's argument ``ops``."""
    if isinstance(modes, str):
        modes = dict(entry.strip().partition("=")[::2] for entry in modes.split(","))
    if not isinstance(modes, Mapping):
        return {}
    found: dict[str, Any] = {"fp8": modes.get("linear_fp8", "off") != "off"}
    return found | ({"attention": "reference"} if modes.get("attention") in ("off", False) else {})


def _strategy(trainer: Mapping[str, Any], found: list[Problem]) -> dict[str, Any]:
    name = class_of(trainer.get("strategy"))
    if name not in STRATEGIES:
        reason = "nothing is known of its memory and time"
        found.append(Problem("trainer.strategy", name, reason, ("lightning_megatron.MegatronStrategy",)))
    return arguments_of(trainer.get("strategy"))


def _devices(trainer: Mapping[str, Any], found: list[Problem]) -> int:
    devices, nodes = trainer.get("devices", "auto"), trainer.get("num_nodes", 1)
    devices = len(devices) if isinstance(devices, list) else devices
    devices = int(devices) if isinstance(devices, str) and devices.isdigit() else devices
    if is_whole(devices, at_least=1) and is_whole(nodes, at_least=1):
        return int(devices * nodes)
    found.append(Problem("trainer.devices", devices, "the number of devices is not known: give --devices"))
    return 1


def recipe_shape(recipe: Mapping[str, Any], found: list[Problem], **changes: int) -> TransformerConfig | None:
    """Shape of a recipe's model with other sizes; ``None`` where problems are ``found``."""
    model = recipe.get("model")
    name = class_of(model)
    if name not in DEFAULT_PRESETS:
        reason = "the shape of its model is not known: give --model, or use one of these"
        found.append(Problem("model", name, reason, tuple(DEFAULT_PRESETS)))
        return None
    try:
        shape = arguments_of(model).get("config") or DEFAULT_PRESETS[name]
        return configuration(shape, **{**mapping_of(model, "dict_kwargs"), **changes})
    except ConfigError as error:
        found += error.problems
        return None


def _batch_size(samples: int, devices: int, arguments: Mapping[str, Any], accumulated: int) -> int:
    """Samples of one batch of a replica, for a global batch."""
    sizes = [arguments.get(name) or 1 for name in ("tp", "pp", "cp")]
    replicas = max(1, devices // (sizes[0] * sizes[1] * sizes[2])) * accumulated
    if samples % replicas:
        reason = f"does not split over {replicas} = dp x accumulate_grad_batches"
        near = tuple(dict.fromkeys((max(replicas, samples // replicas * replicas), -(-samples // replicas) * replicas)))
        raise ConfigError([Problem("--global-batch-size", samples, reason, near)])
    return samples // replicas
