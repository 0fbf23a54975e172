"""Checkpoints of Megatron-LM for our models: their configuration, and their tensors by our names."""

from __future__ import annotations

import os

from lightning_megatron.checkpoint.formats.megatron import (
    MegatronCheckpoint,
    config_from_arguments,
    open_megatron,
    size_problems,
    weight_map,
)
from lightning_megatron.checkpoint.formats.translate import to_ours
from lightning_megatron.checkpoint.lazy_tensor import LazyTensor
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import ConfigError, Problem, raise_if_any
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.params import named_specs

Path = str | os.PathLike[str]


def megatron_config(checkpoint: MegatronCheckpoint, path: Path) -> TransformerConfig:
    """The configuration that the checkpoint's command line describes.

    Raises:
        ConfigError: if it is not known, or naming every argument that our model cannot reproduce.
    """
    if checkpoint.arguments is None:
        reason = f"{path} was read without Megatron's command line: name a preset or a file, or add --allow-pickle"
        raise ConfigError([Problem("config", None, reason)])
    return TransformerConfig(**config_from_arguments(checkpoint.arguments))


def megatron_tensors(checkpoint: MegatronCheckpoint, model: GPTModel) -> dict[str, LazyTensor]:
    """The tensors that the parts of a model on this rank need, each read when it is made.

    Raises:
        CheckpointError: naming tensors of another shape.
        ConfigError: naming sizes that the checkpoint contradicts; else tensors that are missing, or that the model has
            no place for.
    """
    raise_if_any(size_problems(checkpoint.tensors, model.config))
    shapes = {name: spec.global_shape for name, _, spec in named_specs(model)}
    return to_ours(checkpoint.tensors, weight_map(model.config), shapes)


def open_megatron_model(path: Path, model: GPTModel) -> dict[str, LazyTensor]:
    """The same of a directory; the configuration is the model's, and pickles are not read.

    Raises:
        CheckpointError: naming files and tensors at fault.
        ConfigError: naming tensors that are missing, or that the model has no place for.
    """
    return megatron_tensors(open_megatron(path), model)
