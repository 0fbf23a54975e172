"""Weights of a checkpoint or another program's directory, loaded into a live model of any layout."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn

from lightning_megatron.checkpoint import Check, Loaded, local_tensors, model_state, open_checkpoint, refuse_nonfinite
from lightning_megatron.checkpoint.formats.hf.directory import refuse_adapter
from lightning_megatron.comm.all_ranks import on_all_ranks
from lightning_megatron.lightning.pretrained.adapter_base import base_is_loaded, is_base, refuse_other_base, wanted
from lightning_megatron.lightning.pretrained.config_check import check_checkpoint
from lightning_megatron.lightning.pretrained.foreign_weights import is_foreign, load_foreign_weights
from lightning_megatron.lightning.pretrained.hugging_face import take_settings
from lightning_megatron.lightning.pretrained.imported_run import IMPORTED_FROM
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.params import named_weights, spec_registry


@dataclass(frozen=True)
class PendingWeights:
    """Weights to load into a module when its model is built.

    Attributes:
        path: a checkpoint directory, a single file of Lightning's, or another program's directory.
        strict: True if names that only one side has are errors.
        checkpoint: Lightning's dictionary without weights, for the module's ``on_load_checkpoint``; ``None`` if only
            weights are loaded.
        base: weights on which the adapters in ``path`` were trained, which are loaded before; ``None`` for none.
    """

    path: Path
    strict: bool = True
    checkpoint: dict[str, Any] | None = field(default=None, repr=False)
    base: Path | None = None

    @classmethod
    def of(
        cls,
        path: str | os.PathLike[str],
        strict: bool,
        checkpoint: dict[str, Any] | None = None,
        base: str | os.PathLike[str] | None = None,
    ) -> PendingWeights:
        """The weights at a path; paths are made absolute now.

        Raises:
            CheckpointError: for a Hugging Face directory that has an adapter beside its weights.
        """
        refuse_adapter(path)
        return cls(Path(path).absolute(), strict, checkpoint, None if base is None else Path(base).absolute())

    def fill(self, module: LightningModule, mesh: ParallelMesh, check: Check = "hashes") -> None:
        """Fill a module whose model is built; all ranks call this, and ``check`` is as of :func:`load_weights`.

        Raises:
            CheckpointError: on every rank, if anything is wrong on any.
        """
        with torch.device("cpu"):  # where files are read; Lightning builds models with their device as the default
            if self.base is not None:
                load_weights(module, self.base, mesh, check=check)
            load_weights(module, self.path, mesh, strict=self.strict, check=check)
        if self.checkpoint is None:
            return
        given = module.state_dict()
        checkpoint = {**self.checkpoint, "state_dict": dict(given)}
        module.on_load_checkpoint(checkpoint)
        edited = {name: value for name, value in checkpoint["state_dict"].items() if value is not given.get(name)}
        if edited:
            module.load_state_dict({**given, **edited}, strict=self.strict)


def trained_names(module: LightningModule) -> set[str]:
    """Names of the parameters that must be finite; a frozen one may be a mask."""
    return {name for name, param in module.named_parameters() if param.requires_grad}


def load_weights(
    module: LightningModule,
    path: str | os.PathLike[str],
    mesh: ParallelMesh,
    *,
    strict: bool = True,
    check: Check = "hashes",
) -> Loaded | None:
    """Fill the parameters and buffers of a module; all ranks call this, and each reads its own part.

    Args:
        module: a module whose model is built.
        path: a checkpoint directory, a single file of Lightning's, or another program's directory.
        strict: True if names that only one side has are errors; they always are for another program's directory.
        check: extent to which files are compared with their manifest.

    Returns:
        The checkpoint's contents beside weights; ``None`` for another program's directory.

    Raises:
        CheckpointError: on every rank, if anything is wrong on any.
    """
    if is_foreign(path):
        load_foreign_weights(module, path, mesh)
        return None
    specs, tensors = spec_registry(module), local_tensors(module)
    opened = open_checkpoint(path, mesh, check=check)
    meta = opened.meta
    refuse_other_base(path, meta, module)
    check_checkpoint(path, meta, module)
    if IMPORTED_FROM in meta:  # other programs have no counters and the like
        weights = {name for name, _, _ in named_weights(module)}
        tensors = {name: tensor for name, tensor in tensors.items() if name in weights}
    state = model_state(wanted(module, tensors, meta), specs, mesh)
    loaded = opened.fill(state, strict=strict)
    on_all_ranks(mesh, f"loading {path}", lambda: refuse_nonfinite(state, trained_names(module)))
    if is_base(module, meta):
        base_is_loaded(module, path, mesh)
    take_settings(module, loaded.meta)
    for name in (*loaded.missing, *loaded.unexpected):
        rank_zero_warn(f"{path}: {name} was {'not found' if name in loaded.missing else 'not asked for'}")
    return loaded
