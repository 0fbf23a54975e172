"""A training job from a recipe with a ``cluster`` section; Lightning and torch are not needed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.errors import ConfigError, Problem, is_whole, problems_of, raise_if_any
from lightning_megatron.families import DEFAULT_PRESETS
from lightning_megatron.tools.cli.recipes.job import STRATEGIES, recipe_shape
from lightning_megatron.tools.launching.cluster import Cluster, cluster_of
from lightning_megatron.tools.launching.job import LAYOUT_SIZES, MODEL_SIZES, OPTIONS, SIZES, TrainingJob
from lightning_megatron.tools.recipes.contents import arguments_of, class_of, contents_of, mapping_of, merged
from lightning_megatron.tools.recipes.environment import changes_of
from lightning_megatron.tools.recipes.names import files_of, is_file

_LAYOUT = ("tp", "pp", "cp", "ep", "etp", "vpp")


def read_job(
    configs: Sequence[str],
    arguments: Sequence[str],
    given: Mapping[str, Any],
    *,
    from_hf: bool = False,
    variables: Mapping[str, str] = os.environ,
) -> TrainingJob:
    """The job of one recipe, or of several, of which later ones override earlier ones, as with ``fit``.

    Args:
        configs: names of recipes, and YAML files.
        arguments: more words for ``fit``.
        given: settings that replace those of the ``cluster`` section.
        from_hf: True if the run begins with weights from a Hugging Face directory.
        variables: variables, of which some replace sizes of the recipe, unless the section has them too.

    Raises:
        ConfigError: with every fault of the section, and of sizes that do not fit together.
    """
    recipe = contents_of([file for config in configs for file in files_of(config)])
    trainer = mapping_of(recipe, "trainer")
    section = recipe.get("cluster") or {}
    if isinstance(section, Mapping):
        section = {**_of_trainer(trainer), "name": _name(configs[0]), **section, **given}
    cluster = cluster_of(section, variables)
    changed = {name: variables[name] for name in OPTIONS if variables.get(name)}
    cluster = replace(cluster, environment={**changed, **cluster.environment})
    found = _contradictions(trainer, recipe.get("cluster"), cluster) + _size_problems(cluster.environment, arguments)
    raise_if_any(found or _layout_problems(trainer, cluster) + ([] if arguments else _model_problems(recipe, cluster)))
    moved = merged(recipe, changes_of(recipe, cluster.environment))
    parts = tuple(config for config in configs if _is_for_fit(config))
    return TrainingJob(cluster, parts, tuple(arguments), _checkpoints(mapping_of(moved, "trainer")), from_hf)


def _is_for_fit(config: str) -> bool:
    """False for a file with a ``cluster`` section alone, which ``fit`` does not read."""
    return bool(contents_of(files_of(config)).keys() - {"cluster"})


def _size_problems(environment: Mapping[str, str], arguments: Sequence[str]) -> list[Problem]:
    """Problems of variables that replace sizes of the recipe."""
    found = [
        Problem(name, environment[name], "must be a whole number of at least 1")
        for name in SIZES
        if environment.get(name) and not (environment[name].isdigit() and int(environment[name]))
    ]
    fields = {word.partition("=")[0].rpartition(".")[2]: word for word in arguments if word.startswith("--")}
    for name, words in OPTIONS.items():
        again = fields.get(words[-1].rpartition(".")[2])
        if environment.get(name) and again is not None:
            found.append(Problem(name, environment[name], f"is given by {again} too: give one of them"))
    return found


def _of_trainer(trainer: Mapping[str, Any]) -> dict[str, int]:
    """Sizes that the recipe gives the Trainer."""
    sizes = {"nodes": trainer.get("num_nodes"), "devices_per_node": trainer.get("devices")}
    return {name: size for name, size in sizes.items() if size is not None and is_whole(size, at_least=1)}


def _contradictions(trainer: Mapping[str, Any], section: object, cluster: Cluster) -> list[Problem]:
    """The problem of a recipe's ``trainer.devices`` that is no number, unless the section replaces it."""
    devices = trainer.get("devices")
    is_given = isinstance(section, Mapping) and "devices_per_node" in section
    if is_whole(devices, at_least=1) or is_given or devices is None:
        return []
    reason = "is no number of processes for a machine: give cluster.devices_per_node"
    return [Problem("trainer.devices", devices, reason, (cluster.devices_per_node,))]


def _layout_problems(trainer: Mapping[str, Any], cluster: Cluster) -> list[Problem]:
    """Problems of the strategy's layout on the ranks of the cluster."""
    if class_of(trainer.get("strategy")) not in STRATEGIES:
        return []
    arguments = arguments_of(trainer.get("strategy"))
    arguments |= {n.lower(): int(cluster.environment[n]) for n in LAYOUT_SIZES if cluster.environment.get(n)}
    sizes = {size: arguments[size] for size in _LAYOUT if arguments.get(size) is not None}
    faults = problems_of(lambda: ParallelLayout(**sizes))
    return faults or ParallelLayout(**sizes).problems(world_size=cluster.world_size)


def _model_problems(recipe: Mapping[str, Any], cluster: Cluster) -> list[Problem]:
    """Problems of the model's shape with the sizes of variables; arguments for ``fit`` may change it once more."""
    sizes = {n.lower(): int(cluster.environment[n]) for n in MODEL_SIZES if cluster.environment.get(n)}
    found: list[Problem] = []
    if sizes and class_of(recipe.get("model")) in DEFAULT_PRESETS:
        recipe_shape(recipe, found, **sizes)
    return found


def _checkpoints(trainer: Mapping[str, Any]) -> str | None:
    """Folder of the first ``ModelCheckpoint`` that names one."""
    for callback in trainer.get("callbacks") or []:
        folder = arguments_of(callback).get("dirpath")
        if class_of(callback) == "ModelCheckpoint" and folder is not None:
            return str(folder)
    return None


def _name(config: str) -> str:
    """A name that every launcher accepts, from a recipe's or a file's."""
    own = Path(config).stem if is_file(config) else config
    words = re.sub(r"[^a-z0-9]+", "-", own.lower()).strip("-")[:42].strip("-")
    return words if words[:1].isalpha() else f"run-{words}".strip("-")


def refuse_unknown_partition(cluster: Cluster, known: Sequence[str]) -> None:
    """Compare a job's partition with those of the site.

    Args:
        cluster: cluster of the job.
        known: names of the site's partitions; empty if they are not known.

    Raises:
        ConfigError: if it is not among them.
    """
    partition = cluster.slurm.partition
    if partition is not None and known and partition not in known:
        reason = "this site has no such partition"
        raise ConfigError([Problem("cluster.slurm.partition", partition, reason, tuple(known))])
