"""Entries that hooks write into a checkpoint, from all stages of a pipeline."""

from __future__ import annotations

import io
from typing import Any

import torch

from lightning_megatron.checkpoint.formats.meta import LIGHTNINGS, render_meta
from lightning_megatron.checkpoint.formats.plain import plain
from lightning_megatron.comm.all_ranks import on_all_ranks
from lightning_megatron.comm.objects import gather_object
from lightning_megatron.mesh import ParallelMesh


def of_all_stages(entries: dict[str, Any], mesh: ParallelMesh, action: str) -> dict[str, Any]:
    """A checkpoint's entries, on rank 0 with those that hooks wrote on other stages; all ranks call this.

    Dictionaries are joined. Of several values the last stage's counts, since code behind the model's call runs there
    alone, unless it is ``None`` or empty.

    Args:
        entries: Lightning's dictionary without tensors of the model. The Trainer's own entries stay as they are.
        action: description of the save, for errors.
    """
    if mesh.pp.size == 1:
        return entries
    sends = mesh.pp.rank > 0 and mesh.tp.rank == mesh.dp_cp.rank == 0
    own = {key: value for key, value in entries.items() if key not in LIGHTNINGS} if sends else {}
    content = on_all_ranks(mesh, action, lambda: render_meta(plain(own), allow_objects=False))
    for stage in gather_object(mesh, content) or ():
        entries = _joined(entries, torch.load(io.BytesIO(stage), map_location="cpu", weights_only=True))
    return entries


def _joined(earlier: Any, later: Any) -> Any:
    if isinstance(earlier, dict) and isinstance(later, dict):
        both = {key: _joined(earlier[key], later[key]) for key in earlier.keys() & later.keys()}
        return {**earlier, **later, **both}
    is_nothing = later is None or (isinstance(later, str | list | tuple | set | dict) and not later)
    return earlier if is_nothing else later
