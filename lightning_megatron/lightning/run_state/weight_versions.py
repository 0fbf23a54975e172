"""Checkpoints with several versions of the model, such as averaged weights beside those of training.

Weight averaging puts the averages in ``state_dict`` and the current weights under a key of its own. All of them are
shards, so each version is saved like the model; training resumes from the main values in the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_megatron.checkpoint import State, local_tensors, model_state
from lightning_megatron.checkpoint.tensors.keys import Key, version_key
from lightning_megatron.checkpoint.tensors.state_dict import first_names
from lightning_megatron.comm.objects import all_gather_object
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.params import spec_registry


def repeats(module: LightningModule) -> dict[str, str]:
    """The later names of tied tensors, each with the first one, under which they are saved."""
    found = first_names(module.state_dict(keep_vars=True))
    return {name: first for name, first in found.items() if first != name}


def without_repeats(tensors: Mapping[str, Any], module: LightningModule) -> dict[str, Any]:
    """Drop the later names of tied tensors, which are saved under the first."""
    later = repeats(module)
    return {name: value for name, value in tensors.items() if name not in later}


def with_repeats(tensors: Mapping[str, Any], module: LightningModule) -> dict[str, Any]:
    """Add the later names of tied tensors again."""
    live = module.state_dict(keep_vars=True)
    found = first_names({name: live[name] for name in (*tensors, *live) if name in live})
    return {**tensors, **{name: tensors[first] for name, first in found.items() if first in tensors}}


def take_versions(checkpoint: dict[str, Any], module: LightningModule, mesh: ParallelMesh) -> dict[str, dict[str, Any]]:
    """Remove from a checkpoint the dictionaries that hold the model once more, and return them by key.

    Their names are exactly those of the model, and their tensors have its shapes. All ranks must have such a
    dictionary; they call this together.
    """
    shapes = _shapes(module.state_dict())
    own = [key for key, value in checkpoint.items() if isinstance(value, dict) and _shapes(value) == shapes]
    every = all_gather_object(mesh, own)
    return {key: checkpoint.pop(key) for key in own if all(key in keys for keys in every)}


def _shapes(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name: getattr(value, "shape", None) for name, value in tensors.items()}


def is_edited(tensors: Mapping[str, Any], module: LightningModule) -> bool:
    """True if a ``state_dict`` has other tensors than the module."""
    live = module.state_dict()
    return any(not is_live(value, live.get(name)) for name, value in tensors.items())


def edited_names(tensors: Mapping[str, Any], module: LightningModule) -> set[str]:
    """Names, as checkpoints save them, of the tensors of a ``state_dict`` with other values than the module's."""
    live, specs = module.state_dict(), spec_registry(module)
    pairs = {name: (value, live.get(name)) for name, value in tensors.items()}
    edited = [name for name, pair in pairs.items() if not is_live(*pair) and not _is_equal(*pair)]
    return {specs[name].tied_with or name if name in specs else name for name in edited}


def _is_equal(value: Any, live: Any) -> bool:
    if not isinstance(value, Tensor) or not isinstance(live, Tensor):
        return False
    dtype = torch.promote_types(value.dtype, live.dtype)
    return torch.equal(value.to(live.device, dtype), live.to(dtype))


def is_live(value: Any, live: Any) -> bool:
    """True if a value is the memory of the module itself, or, for other values, of the same type."""
    if not isinstance(value, Tensor) or not isinstance(live, Tensor):
        return type(value) is type(live)
    return value.data_ptr() == live.data_ptr()


def version_state(
    key: str, tensors: Mapping[str, Any], module: LightningModule, mesh: ParallelMesh, *, saving: bool = False
) -> State:
    """Entries of one version in a checkpoint, named ``<key>.<name>``; ``saving`` as for :func:`model_state`."""
    state = model_state(without_repeats(tensors, module), spec_registry(module), mesh, saving=saving)
    return {version_key(key, Key.parse(name).name): value for name, value in state.items()}


def copies(module: LightningModule, at_least: torch.dtype | None = None) -> dict[str, Any]:
    """Copies of the module's tensors, as memory for another version; each tied tensor once.

    Args:
        module: the module.
        at_least: dtype that the copies of floating-point tensors have unless their own holds more values.
    """

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        wider = at_least if at_least is not None and value.is_floating_point() else value.dtype
        return value.detach().to(torch.promote_types(value.dtype, wider), copy=True)

    return {name: copied(value) for name, value in local_tensors(module).items()}
