"""Comparison of the configuration that weights were saved with and that of the model that loads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import prod
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_megatron.adapters.lora import LoRA
from lightning_megatron.checkpoint import CheckpointError
from lightning_megatron.checkpoint.formats.meta import META
from lightning_megatron.checkpoint.loading import Directory, OpenCheckpoint
from lightning_megatron.checkpoint.tensors.keys import Key
from lightning_megatron.config.training_fields import is_of_training
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import ConfigError, Problem, raise_if_any
from lightning_megatron.files import PathLike
from lightning_megatron.lightning.pretrained.parameter_specs import parameter_shapes
from lightning_megatron.lightning.run_state.hyper_parameters import config_of

_OF_A_WHOLE_MODEL = "embedding.word.weight"
_LORA = {field.name for field in fields(LoRA)}
_TOO_MANY = 4  # times as many parameters as there are numbers to fill them


def saved_config(meta: Mapping[str, Any]) -> TransformerConfig | None:
    """The configuration in a checkpoint's dictionary, if it has one that is known here."""
    try:
        return config_of(meta.get("hyper_parameters") or {})
    except (ConfigError, TypeError):  # of another version, which may have had other fields
        return None


def differing_fields(model: TransformerConfig, saved: TransformerConfig) -> dict[str, tuple[Any, Any]]:
    """Differing fields, of those that decide the logits, with their values in the model and in the saved one."""
    ours, theirs = _deciding_fields(model), _deciding_fields(saved)
    names = dict.fromkeys((*ours, *theirs))
    return {name: (ours.get(name), theirs.get(name)) for name in names if ours.get(name) != theirs.get(name)}


def difference_problems(path: PathLike, model: TransformerConfig, saved: TransformerConfig) -> list[Problem]:
    """A problem for each field that differs from those saved at a path; it suggests the saved value."""
    return [
        Problem(name, ours, f"{path} has {theirs!r}", (theirs,))
        for name, (ours, theirs) in differing_fields(model, saved).items()
    ]


def checkpoint_problems(opened: OpenCheckpoint, model: TransformerConfig) -> list[Problem]:
    """Differing fields, if the weights of a checkpoint do not fit a model; found without building the model."""
    saved = saved_config(opened.meta)
    return [] if saved is None else _misfits(opened, saved, model)


def check_checkpoint(path: PathLike, meta: Mapping[str, Any], module: object) -> None:
    """Refuse weights that do not fit, and warn of those that mean something else in this model.

    Args:
        path: path of the checkpoint.
        meta: its dictionary.
        module: the module; its adapters are checked, and its ``model_shape`` if that is a ``TransformerConfig``.

    Raises:
        ConfigError: naming every field that differs, if the weights do not fit, or adapters get another factor.
    """
    saved, model = saved_config(meta), getattr(module, "model_shape", None)
    raise_if_any(_other_scales(path, (meta.get("hyper_parameters") or {}).get("lora"), getattr(module, "lora", None)))
    if saved is None or not isinstance(model, TransformerConfig):
        return
    raise_if_any(_misfits(path, saved, model))
    if different := differing_fields(model, saved):
        told = ", ".join(f"{name}={theirs!r} (here {ours!r})" for name, (ours, theirs) in different.items())
        rank_zero_warn(f"{path} was saved from a model that computes something else with these weights: {told}")


def refuse_unfilled_checkpoint(opened: OpenCheckpoint) -> None:
    """Raise where a checkpoint of a whole model describes a far larger one, which is about to be built.

    Raises:
        CheckpointError: with both sizes.
    """
    saved = saved_config(opened.meta)
    if saved is None or not isinstance(opened.source, Directory):
        return
    entries = opened.source.metadata.state_dict_metadata
    shapes = {key: tuple(entry.size) for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    if any(key.endswith(_OF_A_WHOLE_MODEL) for key in shapes):
        weights = [shape for key, shape in shapes.items() if Key.parse(key).is_model]
        refuse_unfilled(f"{opened}/{META}", saved, weights)


def refuse_unfilled(source: str, config: TransformerConfig, shapes: Sequence[tuple[int, ...]]) -> None:
    """Raise if the configuration in a file has far more parameters than the tensors beside it, which have ``shapes``.

    Smaller misfits are named later.

    Raises:
        CheckpointError: with both sizes.
    """
    there = sum(prod(shape) for shape in shapes)
    if config.num_layers > len(shapes) or config.num_parameters() > _TOO_MANY * there:
        raise CheckpointError(
            f"{source} describes {config.num_layers} layers of {config.hidden_size} features with a vocabulary of"
            f" {config.vocab_size}, and the weights beside it are {len(shapes)} tensors of {there} numbers"
        )


def _deciding_fields(config: TransformerConfig) -> dict[str, Any]:
    """Fields that decide the logits, in a form in which equal models have equal fields."""
    found = {
        field.name: getattr(config, field.name) for field in fields(config) if not is_of_training(field.name, config)
    }
    if config.position_embedding != "learned":
        del found["max_position_embeddings"]  # no weight depends on it
    if not config.num_experts:
        return found
    with_experts = tuple(filter(config.has_experts, range(config.num_layers)))
    if len(with_experts) == config.num_layers:
        del found["ffn_hidden_size"]
    sizes = {"moe_ffn_hidden_size": config.expert_ffn_hidden_size}
    return found | sizes | {"moe_layers": with_experts, "moe_expert_bias": config.has_expert_bias}


def _other_scales(path: PathLike, saved: object, adapters: object) -> list[Problem]:
    """Settings of adapters that would multiply the matrices of a checkpoint by another factor than in training."""
    if not isinstance(saved, Mapping) or not isinstance(adapters, Mapping):
        return []
    both = [
        (name, ours, LoRA(**saved[name])) for name, ours in adapters.items() if isinstance(saved.get(name), Mapping)
    ]
    return [
        Problem(f"lora.{name}.{field}", here, f"{path} was trained with {there}, and its matrices fit that", (there,))
        for name, ours, theirs in both
        if ours.scale != theirs.scale
        for field in ("alpha", "rank", "rslora")
        if (here := getattr(ours, field)) != (there := getattr(theirs, field))
    ]


def _misfits(path: PathLike, saved: TransformerConfig, model: TransformerConfig) -> list[Problem]:
    """Every differing field, if the shapes of the weights differ; else none."""
    fits = model.num_layers == saved.num_layers and parameter_shapes(model) == parameter_shapes(saved)
    return [] if fits else difference_problems(path, model, saved)
