"""Weights alone, from whatever holds some, into a live model of any layout: the start of a run, or an evaluation."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn

from lightning_megatron.checkpoint import Check, Loaded, load, local_tensors, model_state, refuse_nonfinite
from lightning_megatron.checkpoint.all_ranks import on_all_ranks
from lightning_megatron.lightning.pretrained.hugging_face import take_settings
from lightning_megatron.lightning.pretrained.load import is_foreign, load_foreign_weights
from lightning_megatron.lightning.pretrained.saved_shape import compare
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.params import spec_registry

IMPORTED_FROM = "imported_from"
"""Key of a checkpoint that was converted from another format, and so begins a run instead of continuing one."""


@dataclass(frozen=True)
class Weights:
    """The weights that a module takes when its model is built.

    Attributes:
        path: a checkpoint directory, a single file of Lightning's, or a directory of another program's.
        strict: whether names that only one side has are errors.
        checkpoint: Lightning's dictionary without weights, for the module's ``on_load_checkpoint``; ``None`` if nobody
            loads a whole checkpoint.
    """

    path: Path
    strict: bool = True
    checkpoint: dict[str, Any] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, path: str | os.PathLike[str], strict: bool, checkpoint: dict[str, Any] | None = None) -> Weights:
        """Those of a path, which is remembered from the working directory of today."""
        return cls(Path(path).absolute(), strict, checkpoint)

    def fill(self, module: LightningModule, mesh: ParallelMesh, check: Check = "hashes") -> None:
        """Fill a module whose model is built; all ranks call this.

        Args:
            module: its model is built.
            mesh: this rank's.
            check: the extent to which files are held against what was written.

        Raises:
            CheckpointError: on every rank, if anything is wrong on any.
        """
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
    """Names of the parameters that must be finite; what is frozen may be a mask."""
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
        module: its model is built.
        path: as :attr:`Weights.path`.
        mesh: this rank's.
        strict: as :attr:`Weights.strict`; of another program's directory all is taken, whatever it says.
        check: the extent to which files are held against what was written.

    Returns:
        What the checkpoint gave beside weights; ``None`` for a directory of another program.

    Raises:
        CheckpointError: on every rank, if anything is wrong on any.
    """
    if is_foreign(path):
        load_foreign_weights(module, path, mesh)
        return None
    specs, tensors = spec_registry(module), local_tensors(module)
    meta = load(path, {}, mesh, check=check).meta
    compare(path, meta, getattr(module, "model_shape", None))
    if IMPORTED_FROM in meta:  # it has parameters, and nothing that modules keep beside them
        tensors = {name: tensor for name, tensor in tensors.items() if name in specs}
    state = model_state(tensors, specs, mesh)
    loaded = load(path, state, mesh, strict=strict, check="sizes")
    on_all_ranks(mesh, f"loading {path}", lambda: refuse_nonfinite(state, trained_names(module)))
    take_settings(module, loaded.meta)
    for name in (*loaded.missing, *loaded.unexpected):
        rank_zero_warn(f"{path}: {name} was {'not found' if name in loaded.missing else 'not asked for'}")
    return loaded
