"""Weights that another program wrote into a live model of any layout: the start of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import lightning
from torch import nn

from lightning_megatron.checkpoint import CheckpointError
from lightning_megatron.checkpoint.all_ranks import on_all_ranks
from lightning_megatron.checkpoint.formats.hf.directory import is_hf_directory
from lightning_megatron.checkpoint.formats.megatron import is_megatron_directory
from lightning_megatron.checkpoint.lazy_tensor import LazyTensor
from lightning_megatron.lightning.pretrained.hugging_face import open_hf
from lightning_megatron.lightning.pretrained.megatron import open_megatron_model
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.params import copy_slice, named_specs

Path = str | os.PathLike[str]

_READERS: tuple[tuple[Callable[[Path], bool], Callable[[Path, GPTModel], Mapping[str, LazyTensor]]], ...] = (
    (is_hf_directory, open_hf),
    (is_megatron_directory, open_megatron_model),
)
"""How to know a format, and how to open it for the parts of a model on this rank: whole tensors by our names."""


def is_foreign(path: Path) -> bool:
    """True if a path holds weights in a format of another program that can be read."""
    return any(knows(path) for knows, _ in _READERS)


def load_foreign_weights(module: nn.Module, path: Path, mesh: ParallelMesh) -> None:
    """Fill the model inside a module; all ranks call this, and each reads what its own stages need.

    One tensor is in memory at a time beside the model.

    Args:
        module: holds one :class:`GPTModel`.
        path: the directory.
        mesh: this rank's.

    Raises:
        CheckpointError: on every rank, if anything is wrong on any.
    """

    def open_it() -> tuple[GPTModel, Mapping[str, LazyTensor]]:
        models = [part for part in module.modules() if isinstance(part, GPTModel)]
        if len(models) != 1:
            raise CheckpointError(f"{type(module).__name__} holds {len(models)} models of type GPTModel, not one")
        opens = next((opens for knows, opens in _READERS if knows(path)), open_hf)
        return models[0], opens(path, models[0])

    def fill() -> None:
        for name, param, spec in named_specs(model):
            copy_slice(name, param, spec, tensors[name].materialize(), mesh.shard_ranks)

    doing = f"loading {path}"
    model, tensors = on_all_ranks(mesh, doing, open_it)
    on_all_ranks(mesh, doing, fill)


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
