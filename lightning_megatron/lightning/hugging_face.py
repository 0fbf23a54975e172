"""Weights of a Hugging Face directory into a live model of any layout."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import lightning
from torch import nn

from lightning_megatron.checkpoint import CheckpointError
from lightning_megatron.checkpoint.hf import family_of
from lightning_megatron.checkpoint.hf.directory import read_config, read_tensors
from lightning_megatron.checkpoint.hf.translate import to_ours
from lightning_megatron.checkpoint.together import together
from lightning_megatron.checkpoint.whole import WholeTensor
from lightning_megatron.config import Problem, raise_if_any
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.params import copy_slice, named_specs

Path = str | os.PathLike[str]

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


def hf_problems(path: Path, config: TransformerConfig) -> list[Problem]:
    """What a model of this configuration would compute otherwise than the Hugging Face one."""
    ours, theirs = _computed(config), _computed(hf_config(path))
    return [
        Problem(name, ours.get(name), f"{path} has {theirs.get(name)!r}", (theirs.get(name),))
        for name in dict.fromkeys((*ours, *theirs))
        if ours.get(name) != theirs.get(name)
    ]


def _computed(config: TransformerConfig) -> dict[str, Any]:
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


def open_hf(path: Path, model: GPTModel) -> dict[str, WholeTensor]:
    """The tensors of a directory that the parts of a model on this rank need, each read when it is made.

    Raises:
        CheckpointError: naming files and tensors at fault.
        ConfigError: naming every difference of the configurations.
    """
    raise_if_any(hf_problems(path, model.config))
    rules = family_of(read_config(path)).weight_map(model.config)
    return to_ours(read_tensors(path), rules, {name: spec.global_shape for name, _, spec in named_specs(model)})


def load_hf_weights(module: nn.Module, path: Path, mesh: ParallelMesh) -> None:
    """Fill the model inside a module; all ranks call this, and each reads what its own stages need.

    One tensor is in memory at a time beside the model.

    Args:
        module: holds one :class:`GPTModel`.
        path: the directory.
        mesh: this rank's.

    Raises:
        CheckpointError: on every rank, if anything is wrong on any.
    """

    def open_it() -> tuple[GPTModel, dict[str, WholeTensor]]:
        models = [part for part in module.modules() if isinstance(part, GPTModel)]
        if len(models) != 1:
            raise CheckpointError(f"{type(module).__name__} holds {len(models)} models of type GPTModel, not one")
        return models[0], open_hf(path, models[0])

    def fill() -> None:
        for name, param, spec in named_specs(model):
            copy_slice(name, param, spec, tensors[name].make(), mesh.shard_ranks)

    doing = f"loading {path}"
    model, tensors = together(mesh, doing, open_it)
    together(mesh, doing, fill)


def fresh_run(hyper_parameters: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Lightning's dictionary of a run that has not begun: no loops, callbacks, schedulers or optimizers to restore."""
    given = {} if hyper_parameters is None else {"hyper_parameters": dict(hyper_parameters)}
    return {
        "pytorch-lightning_version": lightning.__version__,
        "epoch": 0,
        "global_step": 0,
        "lr_schedulers": [],
        **given,
    }
