"""The frozen weights that adapters are trained on: checkpoints leave them out, and record their path and hash."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import nn

from lightning_megatron.adapters.attach import adapter_of
from lightning_megatron.checkpoint import CheckpointError
from lightning_megatron.checkpoint.formats.hf.directory import is_hf_directory, weight_files
from lightning_megatron.checkpoint.integrity.block_sums import FileRange, check_sums
from lightning_megatron.checkpoint.integrity.manifest import hash_of
from lightning_megatron.checkpoint.select.hashes import ranges_by_rank
from lightning_megatron.comm.all_ranks import on_all_ranks
from lightning_megatron.comm.objects import all_gather_object
from lightning_megatron.files import PathLike
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.stages import StagedModel

ADAPTER_OF = "adapter_of"
"""Key of a checkpoint that holds adapters alone: path and hash of the weights that they were trained on."""

_TRAINED = "trained_adapter"
_WEIGHTS = (".distcp", ".metadata", ".ckpt")
_SHOWN = 12


@runtime_checkable
class Adapted(Protocol):
    """A module with adapters."""

    base: Mapping[str, str] | None
    lora: Mapping[str, Any]

    @property
    def trained_adapter(self) -> str | None:
        """Name of the adapter that is trained."""
        ...

    def resume_adapter(self, name: str, path: PathLike, *, trains: bool) -> None:
        """Use the adapter that a checkpoint's run trained."""
        ...

    def begin_adapters(self) -> None:
        """Initialize the parts of adapters that start from the frozen weights."""
        ...


def base_of(path: PathLike, mesh: ParallelMesh) -> dict[str, str]:
    """Path and hash of the weights of a Hugging Face directory, a checkpoint or a single file.

    All ranks call this, and each reads a part of the files.

    Raises:
        CheckpointError: on every rank, if a file cannot be read on any.
    """
    whole = Path(path)

    def read() -> dict[tuple[str, int], bytes]:
        if is_hf_directory(whole):
            files = weight_files(whole)
        else:
            files = [whole] if whole.is_file() else [file for file in whole.iterdir() if file.name.endswith(_WEIGHTS)]
        lengths = {file.name: file.stat().st_size for file in files}
        own = ranges_by_rank(lengths, mesh.world.size)[mesh.rank]
        folder = whole.parent if whole.is_file() else whole
        return {(name, start): check_sums([FileRange(folder / name, start, end)]) for name, start, end in own}

    found: dict[tuple[str, int], bytes] = {}
    for sums in all_gather_object(mesh, on_all_ranks(mesh, f"hashing {path}", read)):
        found |= sums
    names = sorted({name for name, _ in found})
    hashes = [hash_of(b"".join(found[key] for key in sorted(found) if key[0] == name)) for name in names]
    return {"path": os.fspath(whole.absolute()), "hash": hash_of("".join(hashes).encode())}


def base_is_loaded(module: nn.Module, path: PathLike, mesh: ParallelMesh) -> None:
    """Record path and hash of the weights under a module's adapters, and initialize these; all ranks call this."""
    if isinstance(module, Adapted) and module.lora:
        module.base = base_of(path, mesh)
        module.begin_adapters()


def path_of_base(path: PathLike, meta: Mapping[str, Any], given: PathLike | None) -> PathLike | None:
    """Path of the weights that the adapters of a checkpoint need; ``None`` for a checkpoint of a whole model.

    Args:
        path: the checkpoint.
        meta: its dictionary.
        given: path that replaces the one in the checkpoint; ``None`` to use that one.

    Raises:
        CheckpointError: if nothing exists at the path.
    """
    if ADAPTER_OF not in meta:
        return None
    base = meta[ADAPTER_OF]["path"] if given is None else given
    if not os.path.exists(base):
        told = "and there is nothing there" if given is None else f"and there is nothing at base={os.fspath(given)!r}"
        was = meta[ADAPTER_OF]["path"]
        raise CheckpointError(f"{path} holds adapters of {was}, {told}: give base=, the path of these weights")
    return base


def refuse_other_base(path: PathLike, meta: Mapping[str, Any], module: object) -> None:
    """Refuse adapters of other weights, and adapters for a module without their weights.

    Raises:
        CheckpointError: with the paths and hashes of both.
    """
    said = meta.get(ADAPTER_OF)
    if said is None:
        return
    if not isinstance(module, Adapted) or not module.lora:
        raise CheckpointError(
            f"{path} holds adapters alone, and the module has none: give it lora=, or merge them first with"
            " `lightning-megatron convert merge`"
        )
    if module.base is None:
        raise CheckpointError(
            f"{path} holds adapters alone: load the weights that they were trained on first, those of {said['path']}"
        )
    if module.base["hash"] != said["hash"]:
        ours, theirs = module.base, said
        raise CheckpointError(
            f"{path} holds adapters of {theirs['path']} (weights {theirs['hash'][:_SHOWN]}), and the module has those"
            f" of {ours['path']} (weights {ours['hash'][:_SHOWN]}), which differ"
        )


def frozen_names(module: nn.Module) -> set[str]:
    """Names in a module's ``state_dict`` of the weights and buffers of its model without adapters."""
    found = set()
    for prefix, part in module.named_modules():
        if isinstance(part, StagedModel):
            names = (f"{prefix}.{name}" if prefix else name for name in part.state_dict())
            found |= {name for name in names if adapter_of(name) is None}
    return found


def kept_names(module: nn.Module, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that checkpoints of a module hold: all, or all but the frozen weights where these are in files."""
    if not isinstance(module, Adapted) or not module.lora or module.base is None:
        return dict(tensors)
    frozen = frozen_names(module)
    return {name: value for name, value in tensors.items() if name not in frozen}


def wanted(module: nn.Module, tensors: Mapping[str, Any], meta: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a module's tensors that a checkpoint can fill: adapters alone, the model without them, or all."""
    if not isinstance(module, Adapted) or not module.lora:
        return dict(tensors)
    if ADAPTER_OF in meta:
        frozen = frozen_names(module)
        return {name: value for name, value in tensors.items() if name not in frozen}
    if is_base(module, meta):
        return {name: value for name, value in tensors.items() if adapter_of(name) is None}
    module.base = None  # the checkpoint has weights of its own
    return dict(tensors)


def is_base(module: object, meta: Mapping[str, Any]) -> bool:
    """True for a checkpoint of a model without adapters, where the module has some."""
    adapted = isinstance(module, Adapted) and bool(module.lora)
    return adapted and ADAPTER_OF not in meta and "lora" not in (meta.get("hyper_parameters") or {})


def resume_adapter(path: PathLike, meta: Mapping[str, Any], module: object, *, trains: bool) -> None:
    """Use the adapter that the run of a checkpoint trained, or refuse to train another.

    Raises:
        ConfigError: if the module's user has chosen another, and this run ``trains``.
    """
    name = meta.get(_TRAINED)
    if name is not None and isinstance(module, Adapted):
        module.resume_adapter(name, path, trains=trains)


def adapter_entries(module: object) -> dict[str, Any]:
    """Entries of a checkpoint: the adapter that is trained, and the frozen weights where it does not hold them."""
    if not isinstance(module, Adapted) or not module.lora:
        return {}
    base = {} if module.base is None else {ADAPTER_OF: dict(module.base)}
    return {_TRAINED: module.trained_adapter, **base}
