"""Checkpoints of Megatron-LM: their configuration, and their tensors by our names."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_megatron.checkpoint.formats.megatron import (
    MegatronCheckpoint,
    config_from_arguments,
    size_problems,
    weight_map,
)
from lightning_megatron.checkpoint.lazy_tensor import LazyTensor
from lightning_megatron.config.parameter_specs import parameter_shapes
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import ConfigError, Problem, raise_if_any
from lightning_megatron.files import PathLike


def megatron_config(checkpoint: MegatronCheckpoint, path: PathLike) -> TransformerConfig:
    """The configuration that the checkpoint's command line describes.

    Raises:
        ConfigError: if it is not known, or naming every argument that our model cannot reproduce.
    """
    if checkpoint.arguments is None:
        reason = f"{path} was read without Megatron's command line: name a preset or a file, or add --allow-pickle"
        raise ConfigError([Problem("config", None, reason)])
    return TransformerConfig(**config_from_arguments(checkpoint.arguments))


def megatron_tensors(
    checkpoint: MegatronCheckpoint, config: TransformerConfig, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> dict[str, LazyTensor]:
    """Tensors of a checkpoint by our names.

    Args:
        checkpoint: the opened checkpoint.
        config: the model's configuration.
        shapes: required shapes by global name, other tensors are left out; ``None`` for those of the configuration.

    Raises:
        CheckpointError: naming tensors of another shape.
        ConfigError: naming sizes that the checkpoint contradicts; else tensors that are missing, or that the model has
            no place for.
    """
    raise_if_any(size_problems(checkpoint.tensors, config))
    # Sizes come first: a file that describes a billion layers is refused before their names are made.
    return weight_map(config).to_native(checkpoint.tensors, parameter_shapes(config) if shapes is None else shapes)
