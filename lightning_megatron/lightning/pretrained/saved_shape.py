"""A checkpoint's model and the one that is to take its weights, compared by configuration before tensors are."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_megatron.checkpoint import CheckpointError
from lightning_megatron.checkpoint.integrity.metadata_file import read_metadata
from lightning_megatron.checkpoint.keys import Key
from lightning_megatron.checkpoint.meta import META
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import ConfigError, Problem, raise_if_any
from lightning_megatron.lightning.checkpointing.hyper_parameters import config_of, read_meta
from lightning_megatron.lightning.pretrained.hugging_face import computed, refuse_unfilled
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.params import named_specs

Path = str | os.PathLike[str]

_OF_A_WHOLE_MODEL = "embedding.word.weight"


def path_problems(path: Path, model: TransformerConfig) -> list[Problem]:
    """Fields for which the weights of a checkpoint do not fit a model, before anything of the size of one is built."""
    try:
        saved = _saved(read_meta(path))
    except CheckpointError:  # loading says so, or takes an older one in its place
        return []
    return [] if saved is None else _problems(path, saved, model)


def compare(path: Path, meta: Mapping[str, Any], model: object) -> None:
    """Refuse weights that do not fit, and warn of those that mean something else in this model.

    Args:
        path: of the checkpoint.
        meta: its dictionary.
        model: the module's ``model_shape``; what is no configuration of ours is passed over.

    Raises:
        ConfigError: naming every field that differs, if the weights do not fit.
    """
    saved = _saved(meta)
    if saved is None or not isinstance(model, TransformerConfig):
        return
    raise_if_any(_problems(path, saved, model))
    if different := _differences(saved, model):
        told = ", ".join(f"{name}={theirs!r} (here {ours!r})" for name, (ours, theirs) in different.items())
        rank_zero_warn(f"{path} was saved from a model that computes something else with these weights: {told}")


def refuse_unfilled_model(path: Path, meta: Mapping[str, Any]) -> None:
    """Raise where a checkpoint of a whole model describes a far larger one, which is about to be built.

    Raises:
        CheckpointError: with both sizes.
    """
    saved = _saved(meta)
    if saved is None or not os.path.isdir(path):
        return
    entries = read_metadata(pathlib.Path(path)).state_dict_metadata
    shapes = {key: tuple(entry.size) for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    if any(key.endswith(_OF_A_WHOLE_MODEL) for key in shapes):
        weights = [shape for key, shape in shapes.items() if Key.parse(key).is_model]
        refuse_unfilled(f"{os.fspath(path)}/{META}", saved, weights)


def _saved(meta: Mapping[str, Any]) -> TransformerConfig | None:
    try:
        return config_of(meta.get("hyper_parameters") or {})
    except (ConfigError, TypeError):  # of another version, which may have had other fields
        return None


def _differences(saved: TransformerConfig, model: TransformerConfig) -> dict[str, tuple[Any, Any]]:
    """Fields that decide what is computed, with the value here and that of the checkpoint."""
    ours, theirs = computed(model), computed(saved)
    names = dict.fromkeys((*ours, *theirs))
    return {name: (ours.get(name), theirs.get(name)) for name in names if ours.get(name) != theirs.get(name)}


def _problems(path: Path, saved: TransformerConfig, model: TransformerConfig) -> list[Problem]:
    different = _differences(saved, model)
    if not different or (model.num_layers == saved.num_layers and _shapes(model) == _shapes(saved)):
        return []
    return [Problem(name, ours, f"{path} has {theirs!r}", (theirs,)) for name, (ours, theirs) in different.items()]


def _shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Shapes by name; none where they are beyond what torch can count."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return {name: spec.global_shape for name, _, spec in named_specs(GPTModel(config))}
    except RuntimeError:
        return {}
