"""Checkpoints of Megatron-LM: their configuration, and their tensors by our names."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_megatron.checkpoint.formats.megatron import (
    MegatronCheckpoint,
    config_from_arguments,
    size_problems,
)
from lightning_megatron.checkpoint.formats.megatron.families import family_of_checkpoint
from lightning_megatron.checkpoint.formats.megatron.weight_map import megatron_weight_map
from lightning_megatron.checkpoint.tensors.lazy_tensor import LazyTensor
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import ConfigError, Problem, raise_if_any
from lightning_megatron.files import PathLike
from lightning_megatron.lightning.pretrained.parameter_specs import parameter_shapes


def megatron_config(checkpoint: MegatronCheckpoint, path: PathLike) -> TransformerConfig:
    """The configuration that the checkpoint's command line describes.

    Raises:
        ConfigError: if it is not known, or naming every argument that our model cannot reproduce.
    """
    if checkpoint.arguments is None:
        reason = f"{path} was read without Megatron's command line: name a preset or a file, or add --allow-pickle"
        raise ConfigError([Problem("config", None, reason)])
    if checkpoint.is_old and "bias_gelu_fusion" not in checkpoint.arguments:
        reason = f"the command line in {path} is older than that argument, and does not say which GELU the model has"
        raise ConfigError([Problem("config", None, f"{reason}: name a preset or a file")])
    fields = config_from_arguments(checkpoint.arguments)
    family = family_of_checkpoint(checkpoint)
    return family.config(fields, checkpoint) if family else TransformerConfig(**fields)


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
    _refuse_groups(checkpoint, config)
    whole = parameter_shapes(config)
    rules = megatron_weight_map(config, whole.keys(), checkpoint.qkv_order)
    return rules.to_native(checkpoint.tensors, whole if shapes is None else shapes)


def _refuse_groups(checkpoint: MegatronCheckpoint, config: TransformerConfig) -> None:
    heads, groups = config.num_attention_heads, config.num_query_groups
    if checkpoint.qkv_order != "head" and groups != heads:
        reason = "in a checkpoint as old as this one each head has keys and values of its own"
        raise ConfigError([Problem("num_query_groups", groups, reason, (heads,))])
