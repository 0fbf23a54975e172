"""Hugging Face directories for our models: their configuration, and their tensors by our names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import prod
from typing import Any

from lightning_megatron.checkpoint import CheckpointError
from lightning_megatron.checkpoint.formats.hf import family_of
from lightning_megatron.checkpoint.formats.hf.directory import CONFIG, read_config, read_tensors
from lightning_megatron.checkpoint.formats.hf.settings import SETTINGS
from lightning_megatron.checkpoint.formats.translate import to_ours
from lightning_megatron.checkpoint.lazy_tensor import LazyTensor
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import Problem, raise_if_any
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.params import named_specs

Path = str | os.PathLike[str]

_TOO_MANY = 4  # times as many parameters as there are numbers to fill them

# Fields that decide how a model is trained or laid out, and not what it computes from its weights; those of the
# capacity of experts are among them.
_OF_TRAINING = {
    "init_std",
    "hidden_dropout",
    "attention_dropout",
    "label_smoothing",
    "vocab_multiple",
    "moe_load_balancing",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_input_jitter_eps",
    "moe_token_dispatcher",
    "moe_token_drop_policy",
    "moe_pad_to_capacity",
    "moe_dynamic",
}


def hf_config(path: Path) -> TransformerConfig:
    """The configuration that ``config.json`` of a directory describes.

    Raises:
        CheckpointError: if there is no such file.
        ConfigError: naming every value that our model cannot reproduce.
    """
    given = read_config(path)
    return TransformerConfig(**family_of(given).config_from_hf(given))


def weighed_config(path: Path) -> TransformerConfig:
    """The same, of a directory whose weights are to fill the model: one that they cannot fill is not even built.

    Raises:
        CheckpointError: also if the weights are missing, or are a small part of what is described.
        ConfigError: naming every value that our model cannot reproduce.
    """
    config = hf_config(path)
    tensors = read_tensors(path)
    refuse_unfilled(f"{os.fspath(path)}/{CONFIG}", config, [tensor.shape for tensor in tensors.values()])
    return config


def refuse_unfilled(source: str, config: TransformerConfig, shapes: Sequence[tuple[int, ...]]) -> None:
    """Raise where a description asks for far more memory than what lies beside it; less is told tensor by tensor.

    Args:
        source: the file that describes.
        config: the model.
        shapes: of the tensors beside it.

    Raises:
        CheckpointError: with both sizes.
    """
    there = sum(prod(shape) for shape in shapes)
    if config.num_layers > len(shapes) or config.num_parameters() > _TOO_MANY * there:
        raise CheckpointError(
            f"{source} describes {config.num_layers} layers of {config.hidden_size} features with a vocabulary of"
            f" {config.vocab_size}, and the weights beside it are {len(shapes)} tensors of {there} numbers"
        )


def hf_problems(path: Path, config: TransformerConfig) -> list[Problem]:
    """What a model of this configuration would compute otherwise than the Hugging Face one."""
    ours, theirs = computed(config), computed(hf_config(path))
    return [
        Problem(name, ours.get(name), f"{path} has {theirs.get(name)!r}", (theirs.get(name),))
        for name in dict.fromkeys((*ours, *theirs))
        if ours.get(name) != theirs.get(name)
    ]


def computed(config: TransformerConfig) -> dict[str, Any]:
    """What decides the logits, in one spelling."""
    found = {
        field.name: getattr(config, field.name)
        for field in fields(config)
        if field.name not in _OF_TRAINING and not field.name.startswith("moe_capacity")
    }
    if config.position_embedding != "learned":
        del found["max_position_embeddings"]  # no weight depends on it
    if not config.num_experts:
        return {name: value for name, value in found.items() if not name.startswith("moe_")}
    with_experts = tuple(filter(config.has_experts, range(config.num_layers)))
    if len(with_experts) == config.num_layers:
        del found["ffn_hidden_size"]
    return found | {"moe_layers": with_experts, "moe_ffn_hidden_size": config.expert_ffn_hidden_size}


def take_settings(module: object, checkpoint: Mapping[str, Any]) -> None:
    """Give a module what its checkpoint knows of the Hugging Face directory that its run began with."""
    if checkpoint.get(SETTINGS) and hasattr(module, "hf_settings"):
        module.hf_settings = checkpoint[SETTINGS]


def kept_settings(module: object) -> dict[str, Any]:
    """The entry of a checkpoint that a later run takes them from; none where the module knows nothing of them."""
    settings = getattr(module, "hf_settings", None)
    return {SETTINGS: settings} if settings else {}


def open_hf(path: Path, model: GPTModel) -> dict[str, LazyTensor]:
    """The tensors of a directory that the parts of a model on this rank need, each read when it is made.

    Raises:
        CheckpointError: naming files and tensors at fault.
        ConfigError: naming every difference of the configurations.
    """
    raise_if_any(hf_problems(path, model.config))
    rules = family_of(read_config(path)).weight_map(model.config)
    return to_ours(read_tensors(path), rules, {name: spec.global_shape for name, _, spec in named_specs(model)})
