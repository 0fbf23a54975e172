"""Hugging Face directories: their configuration, their tensors by our names, and their settings beside the model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lightning_megatron.checkpoint.formats.hf import Family, family_of
from lightning_megatron.checkpoint.formats.hf.directory import CONFIG, read_config, read_tensors
from lightning_megatron.checkpoint.formats.hf.settings import SETTINGS
from lightning_megatron.checkpoint.lazy_tensor import LazyTensor
from lightning_megatron.config.parameter_specs import parameter_shapes
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import Problem
from lightning_megatron.files import PathLike
from lightning_megatron.lightning.pretrained.config_check import difference_problems, refuse_unfilled


def hf_config(path: PathLike) -> TransformerConfig:
    """The configuration that ``config.json`` of a directory describes.

    Raises:
        CheckpointError: if there is no such file.
        ConfigError: naming every value that our model cannot reproduce.
    """
    return _family_and_config(path)[1]


def checked_hf_config(path: PathLike) -> TransformerConfig:
    """The configuration of a directory whose weights are there and fill most of a model of this size.

    Raises:
        CheckpointError: also if the weights are missing, or are a small part of what is described.
        ConfigError: naming every value that our model cannot reproduce.
    """
    config = hf_config(path)
    _refuse_unfilled(path, config, read_tensors(path))
    return config


def open_hf(path: PathLike) -> tuple[TransformerConfig, dict[str, LazyTensor]]:
    """The configuration of a directory, and all tensors of its model by our names.

    Raises:
        CheckpointError: naming files and tensors at fault.
        ConfigError: naming every value that our model cannot reproduce.
    """
    family, config = _family_and_config(path)
    tensors = read_tensors(path)
    _refuse_unfilled(path, config, tensors)
    return config, family.weight_map(config).to_native(tensors, parameter_shapes(config))


def hf_tensors(
    path: PathLike, config: TransformerConfig, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, LazyTensor]:
    """Some tensors of a directory by our names, for a model that exists.

    Args:
        path: the directory.
        config: the model's configuration.
        shapes: required shapes by global name; other tensors are left out.

    Raises:
        CheckpointError: naming files and tensors at fault.
        ConfigError: naming tensors that are missing, or that the model has no place for.
    """
    family = family_of(read_config(path))
    return family.weight_map(config).to_native(read_tensors(path), shapes)


def hf_problems(path: PathLike, config: TransformerConfig) -> list[Problem]:
    """Differences by which a model of this configuration would compute something else than the Hugging Face one."""
    return difference_problems(path, config, hf_config(path))


def take_settings(module: object, checkpoint: Mapping[str, Any]) -> None:
    """Give a module the settings, from its checkpoint, of the Hugging Face directory that its run began with."""
    if checkpoint.get(SETTINGS) and hasattr(module, "hf_settings"):
        module.hf_settings = checkpoint[SETTINGS]


def kept_settings(module: object) -> dict[str, Any]:
    """The entry of a checkpoint that a later run takes them from; empty where the module has none."""
    settings = getattr(module, "hf_settings", None)
    return {SETTINGS: settings} if settings else {}


def _family_and_config(path: PathLike) -> tuple[Family, TransformerConfig]:
    given = read_config(path)
    family = family_of(given)
    return family, TransformerConfig(**family.config_from_hf(given))


def _refuse_unfilled(path: PathLike, config: TransformerConfig, tensors: Mapping[str, LazyTensor]) -> None:
    refuse_unfilled(f"{os.fspath(path)}/{CONFIG}", config, [tensor.shape for tensor in tensors.values()])
