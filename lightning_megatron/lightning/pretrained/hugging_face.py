"""Hugging Face directories: their configuration, their tensors by our names, and their settings beside the model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any, TypeVar

from lightning_megatron.checkpoint import OpenCheckpoint
from lightning_megatron.checkpoint.formats.hf import family_of_weights
from lightning_megatron.checkpoint.formats.hf.directory import (
    CONFIG,
    is_hf_directory,
    read_config,
    read_tensors,
    refuse_adapter,
)
from lightning_megatron.checkpoint.formats.hf.settings import SETTINGS
from lightning_megatron.checkpoint.formats.hf.tensors import weight_map
from lightning_megatron.checkpoint.tensors.lazy_tensor import LazyTensor
from lightning_megatron.config.hugging_face.family import Family
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import ConfigError, Problem
from lightning_megatron.files import PathLike
from lightning_megatron.lightning.pretrained.config_check import (
    checkpoint_problems,
    difference_problems,
    refuse_unfilled,
)
from lightning_megatron.lightning.pretrained.parameter_specs import weight_shapes

ModuleT = TypeVar("ModuleT")


def hf_config(path: PathLike) -> TransformerConfig:
    """The configuration that ``config.json`` of a directory describes.

    Raises:
        CheckpointError: if there is no such file.
        ConfigError: naming every value that our model cannot reproduce.
    """
    return _family_and_config(path)[1]


def checked_hf_config(path: PathLike) -> TransformerConfig:
    """The configuration of a directory, which must also have the weights of most of the model that it describes.

    Raises:
        CheckpointError: also if the weights are missing, or are a small part of what is described.
        ConfigError: naming every value that our model cannot reproduce.
    """
    config = hf_config(path)
    _refuse_unfilled(path, config, read_tensors(path))
    return config


def hf_module_name(path: PathLike) -> str:
    """Full name of the LightningModule that trains the model of a directory.

    Raises:
        CheckpointError: if there is no such directory.
        ConfigError: for a model of an unknown family.
    """
    return family_of_weights(read_config(path)).module.replace(":", ".")


def hf_module_class(path: PathLike, parent: type[ModuleT]) -> type[ModuleT]:
    """The class named by :func:`hf_module_name`, which must be a subclass of ``parent``.

    Raises:
        CheckpointError: if there is no such directory.
        ConfigError: for a model of an unknown family, or if the class is no subclass of ``parent``.
    """
    chosen: type[ModuleT] = resolve_name(hf_module_name(path))
    if not issubclass(chosen, parent):
        kind, near = read_config(path)["model_type"], (chosen.__name__,)
        raise ConfigError([Problem("model_type", kind, f"no {parent.__name__}", near)])
    return chosen


def open_hf(path: PathLike, *, is_base: bool = False) -> tuple[TransformerConfig, dict[str, LazyTensor]]:
    """The configuration of a directory, and all tensors of its model by our names.

    Args:
        path: the directory.
        is_base: True if an adapter is given for its weights, so that one in the directory does not count.

    Raises:
        CheckpointError: naming files and tensors at fault, or an adapter beside the weights.
        ConfigError: naming every value that our model cannot reproduce.
    """
    if not is_base:
        refuse_adapter(path)
    family, config = _family_and_config(path)
    tensors = read_tensors(path)
    _refuse_unfilled(path, config, tensors)
    return config, _to_native(family, config, tensors, weight_shapes(config))


def hf_tensors(
    path: PathLike, config: TransformerConfig, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, LazyTensor]:
    """Tensors of a directory by our names, for a model that exists; those without an entry in ``shapes`` are left out.

    Raises:
        CheckpointError: naming files and tensors at fault.
        ConfigError: naming tensors that are missing, or that the model has no place for.
    """
    family = family_of_weights(read_config(path))
    return _to_native(family, config, read_tensors(path), shapes)


def hf_problems(path: PathLike, config: TransformerConfig) -> list[Problem]:
    """Differences that would let a model of this configuration compute something else than the Hugging Face one."""
    return difference_problems(path, config, hf_config(path))


def weight_problems(path: PathLike, config: TransformerConfig) -> list[Problem]:
    """Reasons why the weights of a Hugging Face directory or an open checkpoint do not fit; none for any other path.

    Raises:
        CheckpointError: for a Hugging Face directory that has an adapter beside its weights.
    """
    if not isinstance(path, OpenCheckpoint):
        refuse_adapter(path)
    found = hf_problems(path, config) if is_hf_directory(path) else []
    return found + (checkpoint_problems(path, config) if isinstance(path, OpenCheckpoint) and path.manifest else [])


def take_settings(module: object, checkpoint: Mapping[str, Any]) -> None:
    """Set ``hf_settings`` of a module from its checkpoint: those of the directory that its run began with."""
    if checkpoint.get(SETTINGS) and hasattr(module, "hf_settings"):
        module.hf_settings = checkpoint[SETTINGS]


def kept_settings(module: object) -> dict[str, Any]:
    """The entry of a checkpoint from which :func:`take_settings` reads; empty if the module has no settings."""
    settings = getattr(module, "hf_settings", None)
    return {SETTINGS: settings} if settings else {}


def _family_and_config(path: PathLike) -> tuple[Family, TransformerConfig]:
    given = read_config(path)
    family = family_of_weights(given)
    return family, family.config_of(given)


def _to_native(
    family: Family, config: TransformerConfig, tensors: Mapping[str, LazyTensor], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, LazyTensor]:
    """Tensors by our names, unless ``config.json`` counts a stack of layers without any tensor in the files."""
    rules = weight_map(family, config, weight_shapes(config))
    for stack, key in family.stack_keys.items():
        if not rules.has_stack(stack, tensors):
            reason = "config.json says so, and no file has their tensors (transformers saves none): write 0 there"
            raise ConfigError([Problem(key, len(config.stacks[stack]), reason, (0,))])
    return rules.to_native(tensors, shapes)


def _refuse_unfilled(path: PathLike, config: TransformerConfig, tensors: Mapping[str, LazyTensor]) -> None:
    refuse_unfilled(f"{os.fspath(path)}/{CONFIG}", config, [tensor.shape for tensor in tensors.values()])
