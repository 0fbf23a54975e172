"""Hyper-parameters in a checkpoint, and a module built from them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.saving import load_hparams_from_tags_csv, load_hparams_from_yaml

from lightning_megatron.checkpoint import CheckpointError, open_checkpoint
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import ConfigError, Problem
from lightning_megatron.models.presets import configuration

LightningModuleT = TypeVar("LightningModuleT", bound=LightningModule)

_OF_CLI = ("_class_path", "_instantiator")
"""LightningCLI notes for itself which class it built; the class is the caller's choice here, not the file's."""


def module_arguments(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Arguments that the module of a checkpoint was built with.

    Raises:
        CheckpointError: if the checkpoint is missing or damaged, or holds no hyper-parameters.
    """
    return _arguments(open_checkpoint(path, check="sizes").meta, path)


def _arguments(meta: Mapping[str, Any], path: str | os.PathLike[str]) -> dict[str, Any]:
    arguments = meta.get("hyper_parameters")
    if arguments is None:
        raise CheckpointError(f"{path} holds no hyper-parameters: its module did not call save_hyperparameters")
    if not isinstance(arguments, Mapping):
        raise CheckpointError(f"{path} holds a {type(arguments).__name__} where hyper-parameters should be")
    return {name: value for name, value in arguments.items() if name not in _OF_CLI}


def config_of(arguments: Mapping[str, Any]) -> TransformerConfig | None:
    """The configuration in the arguments of a :class:`GPTModule`; ``None`` if they have none.

    LightningCLI keeps a model's arguments as they were given: the name of a preset, and beside it the changed fields.
    """
    given = arguments.get("config")
    if not isinstance(given, str | Mapping | TransformerConfig):
        return None
    config = configuration(given)
    names = {field.name for field in fields(config)}
    return config.replace(**{name: value for name, value in arguments.items() if name in names})


def build_module(
    module_class: type[LightningModuleT],
    meta: Mapping[str, Any],
    path: str | os.PathLike[str],
    given: Mapping[str, Any],
    hparams_file: str | Path | None = None,
) -> LightningModuleT:
    """Build a module as ``load_from_checkpoint`` of Lightning does, without its weights.

    Args:
        module_class: class of the module.
        meta: content of the checkpoint's ``meta.pt``.
        path: path of the checkpoint, for error texts.
        given: arguments that win over those of the checkpoint.
        hparams_file: file whose arguments replace the checkpoint's: a logger's ``hparams.yaml`` or ``.csv``.

    Raises:
        CheckpointError: if the class needs arguments that neither side has.
        ConfigError: for a file of another kind.
    """
    if hparams_file is not None:
        meta = {**meta, "hyper_parameters": _from_file(hparams_file)}
    known = inspect.signature(module_class.__init__).parameters
    if meta.get("hyper_parameters") is None:
        needed = [p for p in known.values() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if lacking := [p.name for p in needed if p.name not in ("self", *given)]:
            name, by_name = module_class.__name__, "".join(f", {argument}=..." for argument in lacking)
            raise CheckpointError(
                f"{path} holds no hyper-parameters, and {name} needs some: load_module(path, {name}{by_name}), or"
                f" {name}.load_from_checkpoint; self.save_hyperparameters() in its __init__ keeps them in checkpoints"
            )
        return module_class(**given)
    arguments = _arguments(meta, path)
    as_one = meta.get(LightningModule.CHECKPOINT_HYPER_PARAMS_NAME, "")
    if as_one in known:  # the module was built with one dictionary of that name
        arguments = {as_one: arguments}
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        arguments = {name: value for name, value in arguments.items() if name in known}
    return module_class(**{**arguments, **given})


def target_device(map_location: Any) -> torch.device:
    """The device that ``map_location`` of a ``load_from_checkpoint`` names; the CPU if it names none.

    Raises:
        ConfigError: for a mapping or a function: checkpoints of all ranks do not say which device a tensor was on.
    """
    if map_location is not None and not isinstance(map_location, str | torch.device):
        reason = "checkpoints of several ranks do not say on which devices their tensors were: name one"
        raise ConfigError([Problem("map_location", map_location, reason, (None, "cpu"))])
    return torch.device(map_location or "cpu")


def _from_file(path: str | Path) -> dict[str, Any]:
    readers: dict[str, Callable[..., dict[str, Any]]] = {
        ".csv": load_hparams_from_tags_csv,
        ".yml": load_hparams_from_yaml,
        ".yaml": load_hparams_from_yaml,
    }
    suffix = Path(path).suffix.lower()
    if suffix not in readers:
        raise ConfigError(
            [Problem("hparams_file", str(path), "holds hyper-parameters in one of these", tuple(readers))]
        )
    try:
        return dict(readers[suffix](path))
    except OSError:
        raise
    except Exception as error:  # a Python tag, text that is not YAML: readers raise errors of many types
        raise ConfigError([Problem("hparams_file", str(path), f"cannot be read: {error}")]) from None
