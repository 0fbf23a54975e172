"""Save and load a checkpoint directory: torch.distributed.checkpoint's files, ``meta.pt`` and a manifest.

All ranks call :func:`save` and :func:`load`. Whatever fails on one rank raises on all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from lightning_megatron.checkpoint.all_ranks import on_all_ranks
from lightning_megatron.checkpoint.dcp_planner import load_faults
from lightning_megatron.checkpoint.dcp_storage import read
from lightning_megatron.checkpoint.directory.leftovers import recover
from lightning_megatron.checkpoint.directory.locate import locate
from lightning_megatron.checkpoint.formats.lightning_file import SingleFile
from lightning_megatron.checkpoint.formats.unpacked_size import refuse_oversized
from lightning_megatron.checkpoint.integrity.fault import listed
from lightning_megatron.checkpoint.integrity.hashes import Check, faults_of
from lightning_megatron.checkpoint.integrity.manifest import Progress
from lightning_megatron.checkpoint.integrity.metadata_file import read_metadata
from lightning_megatron.checkpoint.integrity.save_guard import SaveGuard
from lightning_megatron.checkpoint.meta import read_meta, type_faults
from lightning_megatron.checkpoint.save import Draft, complete, own_key
from lightning_megatron.checkpoint.state_dict import State
from lightning_megatron.comm.objects import all_gather_object
from lightning_megatron.errors import CheckpointError, nearest_names
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.params import is_calibration

_SHOWN = 10


@dataclass(frozen=True)
class Directory:
    """An opened checkpoint whose files are as they should be.

    Attributes:
        path: where it is.
        metadata: names, shapes and places of its tensors.
        meta: what was saved beside them.
        layout: fields of the layout it was saved under.
    """

    path: Path
    metadata: Metadata
    meta: dict[str, Any]
    layout: Mapping[str, Any]

    @classmethod
    def open(cls, path: Path, weights_only: bool) -> Directory:
        """Read all but tensors of a checkpoint without faults.

        Args:
            path: the checkpoint.
            weights_only: refuse a ``meta.pt`` that holds objects.

        Raises:
            CheckpointError: if it is no checkpoint.
        """
        metadata = read_metadata(path)
        refuse_oversized(path, metadata)
        return cls(path, metadata, read_meta(path, weights_only), locate(path).layout)

    def read(self, state: State) -> None:
        """Fill a state in place."""
        read(self.path, self.metadata, state)


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint gave beside the tensors that were filled in place.

    Attributes:
        meta: what was saved beside the state.
        layout: fields of the layout it was saved under.
        per_rank: what this rank saved for itself; ``None`` if the layout is another one now, or nothing was saved.
        missing: keys of the state that the checkpoint lacks, left as they were (``strict=False``).
        unexpected: ``model.*`` keys of the checkpoint that no rank asked for (``strict=False``).
    """

    meta: dict[str, Any]
    layout: Mapping[str, Any]
    per_rank: Any
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def save(
    path: str | os.PathLike[str],
    state: State,
    meta: dict[str, Any],
    mesh: ParallelMesh,
    *,
    per_rank: Any = None,
    allow_objects: bool = False,
    guard: SaveGuard | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a checkpoint and give it its name when it is complete and on the disk.

    Until then a checkpoint that has the name stays as it is; it is replaced, not merged.

    Args:
        path: the directory to make, on a file system that all ranks share.
        state: what this rank holds of the model and the optimizers; where there is one rank, also tensors that are made
            while they are written (:class:`~lightning_megatron.checkpoint.lazy_tensor.LazyTensor`).
        meta: anything small, the same on all ranks; rank 0's is saved.
        mesh: who takes part.
        per_rank: what only a rank at the same coordinate of the same layout can use, such as its random streams.
        allow_objects: let ``meta`` hold objects that only ``load(..., weights_only=False)`` can read.
        guard: looks at the state before it is written, and at the files before they get their name.
        progress: how far the run has come, by which the newest checkpoint of a folder is found.

    Raises:
        CheckpointError: on every rank, if anything failed on any; the old checkpoint is then untouched.
    """
    options = {"per_rank": per_rank, "allow_objects": allow_objects, "guard": guard, "progress": progress}
    complete(Draft.of(path, state, meta, mesh, **options), mesh)


def load(
    path: str | os.PathLike[str],
    state: State,
    mesh: ParallelMesh,
    *,
    strict: bool = True,
    weights_only: bool = True,
    check: Check = "hashes",
) -> Loaded:
    """Fill a state in place from a checkpoint of any layout, or from a single file of Lightning's.

    Fragments are filled where they lie; under the other keys the saved value takes the place of the one given.

    Args:
        path: the directory, or the file.
        state: what this rank wants; ask for nothing with an empty one.
        mesh: who takes part.
        strict: whether keys that only one side has are errors. Another shape always is.
        weights_only: refuse a ``meta.pt`` that holds objects.
        check: compare the content of all files with the manifest, shared out over ranks, or their lengths and the
            content of what every rank reads whole.

    Raises:
        CheckpointError: on every rank, if the checkpoint is not one, is damaged, or does not fit.
    """
    path = Path(path)
    doing = f"loading {path}"

    def open_it() -> Directory | SingleFile:
        opened: Directory | SingleFile
        if path.is_file():
            opened = SingleFile.open(path, state, weights_only)
        else:
            opened = Directory.open(path, weights_only)
        if wrong := type_faults(opened.meta):
            raise CheckpointError(f"what it says of the run is damaged: {'; '.join(wrong)}")
        return opened

    def fit() -> list[str]:
        missing, faults = load_faults(state, metadata)
        if strict and (needed := [key for key in missing if not is_calibration(key)]):
            faults = _told_missing(needed, list(metadata.state_dict_metadata)) + faults
        if strict:
            faults += [f"{key}: in the checkpoint, but not in the model" for key in unexpected]
        if faults:
            raise CheckpointError("the checkpoint does not fit:\n" + listed(faults))
        return missing

    on_all_ranks(mesh, doing, lambda: recover(path) if mesh.rank == 0 else None)
    if faults := faults_of(path, mesh, check):
        raise CheckpointError(f"{doing}: the checkpoint is damaged:\n{listed(faults)}")
    source = on_all_ranks(mesh, doing, open_it)
    metadata = source.metadata
    unexpected = _unexpected(state, metadata, mesh)
    missing = on_all_ranks(mesh, doing, fit)

    wanted = {key: value for key, value in state.items() if key not in missing}
    own = own_key(mesh)
    is_own = dict(source.layout) == asdict(mesh.layout) and own in metadata.state_dict_metadata
    if is_own:
        wanted[own] = None
    on_all_ranks(mesh, doing, lambda: source.read(wanted))
    per_rank = wanted.pop(own) if is_own else None
    state.update(wanted)
    return Loaded(source.meta, source.layout, per_rank, tuple(missing), tuple(unexpected))


def _unexpected(state: State, metadata: Metadata, mesh: ParallelMesh) -> list[str]:
    """``model.*`` keys of the checkpoint that no rank asked for, if any rank asks for a model at all."""
    speaks = mesh.tp.rank == mesh.dp_cp.rank == 0
    asked = {key for keys in all_gather_object(mesh, sorted(state) if speaks else []) for key in keys}
    if not any(key.startswith("model.") for key in asked):
        return []
    return [
        key
        for key in metadata.state_dict_metadata
        if key.startswith("model.") and key not in asked and not is_calibration(key)
    ]


def _told_missing(missing: list[str], known: list[str]) -> list[str]:
    told = []
    for family in dict.fromkeys(key.partition(".")[0] for key in missing):
        ours = [key for key in missing if key.partition(".")[0] == family]
        theirs = [key for key in known if key.partition(".")[0] == family]
        if theirs:
            nearest = {key: ", ".join(nearest_names(key, theirs)[:3]) for key in ours[:_SHOWN]}
            told += [f"{key}: not in the checkpoint; nearest: {nearest.get(key)}" for key in ours]
        else:
            there = ", ".join(dict.fromkeys(key.partition(".")[0] for key in known)) or "nothing"
            told.append(f"{family}: the checkpoint has none of it, only: {there} (saved with save_weights_only?)")
    return told
