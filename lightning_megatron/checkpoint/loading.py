"""Loading a checkpoint: :func:`open_checkpoint` reads and checks it once, then a state of any layout is filled from it.

A failure on one rank raises on all of them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_megatron.checkpoint.dcp.fragments import load_faults, read_fragments
from lightning_megatron.checkpoint.directory.leftovers import recover
from lightning_megatron.checkpoint.formats.lightning_file import FilePart, Order, SingleFile
from lightning_megatron.checkpoint.formats.meta import read_meta, type_faults
from lightning_megatron.checkpoint.integrity.fault import listed
from lightning_megatron.checkpoint.integrity.manifest import MANIFEST, Manifest, Progress
from lightning_megatron.checkpoint.integrity.metadata_file import read_metadata
from lightning_megatron.checkpoint.integrity.unpacked_size import refuse_oversized
from lightning_megatron.checkpoint.saving import own_key
from lightning_megatron.checkpoint.select.hashes import Check, compared
from lightning_megatron.checkpoint.tensors.fragment import Chunk, Fragment
from lightning_megatron.checkpoint.tensors.keys import MAIN, Key, groups_key, not_begun, optimizer_family, state_key
from lightning_megatron.checkpoint.tensors.lazy_tensor import LazyTensor
from lightning_megatron.checkpoint.tensors.state_dict import State
from lightning_megatron.comm.all_ranks import on_all_ranks
from lightning_megatron.comm.objects import all_gather_object
from lightning_megatron.errors import CheckpointError, nearest_names
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.params import Box

_SHOWN = 10


@dataclass(frozen=True)
class Directory:
    """An opened checkpoint directory whose files have been checked, with the fields of the layout at the save."""

    path: Path
    metadata: Metadata
    meta: dict[str, Any]
    layout: Mapping[str, Any]

    @classmethod
    def open(cls, path: Path, layout: Mapping[str, Any], weights_only: bool) -> Directory:
        """Read everything but tensors of a checkpoint without faults.

        ``weights_only`` refuses a ``meta.pt`` that holds objects; ``layout`` has the fields of the layout at the save.

        Raises:
            CheckpointError: if it is no checkpoint.
        """
        metadata = read_metadata(path)
        refuse_oversized(path, metadata)
        return cls(path, metadata, read_meta(path, weights_only), layout)

    def part_for(self, state: State, order: Order) -> Directory:
        """Source of a state's values: this directory, whatever the order, since its parameters have names."""
        return self

    def read(self, state: State) -> None:
        """Fill a state in place."""
        read_fragments(self.path, self.metadata, state)


@dataclass(frozen=True)
class Loaded:
    """The content of a checkpoint beside the tensors that were filled in place.

    Attributes:
        meta: content of ``meta.pt``.
        layout: fields of the layout at the save.
        per_rank: values of this rank; ``None`` if the layout has changed, or nothing was saved.
        missing: keys of the state that the checkpoint lacks, left as they were (``strict=False``).
        not_begun: keys of optimizer state that did not exist at the save, left as they were: no gradient so far.
        unexpected: keys of the checkpoint's model, and of kinds of optimizer state, that no rank requested
            (``strict=False``).
    """

    meta: dict[str, Any]
    layout: Mapping[str, Any]
    per_rank: Any
    missing: tuple[str, ...]
    not_begun: tuple[str, ...]
    unexpected: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class OpenCheckpoint(os.PathLike[str]):
    """A checkpoint of any layout, or a single file of Lightning's, whose files have been checked.

    Functions that take the path of a checkpoint take this in its place, and do not open it again.

    Attributes:
        path: its path.
        mesh: ranks that read it together.
        source: its content without tensors.
        manifest: its manifest; ``None`` for a single file.
        stamp: identity of its files, which changes when another checkpoint takes its place.
    """

    path: Path
    mesh: ParallelMesh = field(repr=False)
    source: Directory | SingleFile = field(repr=False)
    manifest: Manifest | None = field(repr=False)
    stamp: tuple[int, ...] | None = field(repr=False)

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    __str__ = __fspath__

    @property
    def progress(self) -> Progress | None:
        """Progress of the run at the save; ``None`` if it is unknown."""
        told = self.source if isinstance(self.source, SingleFile) else self.manifest
        return None if told is None else told.progress

    @property
    def meta(self) -> dict[str, Any]:
        """Content of ``meta.pt``."""
        return self.source.meta

    def fill(
        self, state: State, *, strict: bool = True, is_in_order: bool = True, alike: Collection[str] = ()
    ) -> Loaded:
        """Fill a state. Every rank must call this.

        Fragments are filled in place; other values are replaced by the saved ones.

        Args:
            state: fragments and values that this rank requests.
            strict: True to raise for keys that only one side has. A different shape always raises.
            is_in_order: True if this rank's optimizers list parameters in their order of definition.
            alike: families of optimizers whose kind is the saved one's: these may have had no gradient so far.

        Raises:
            CheckpointError: on every rank, if the checkpoint does not fit.
        """
        mesh, action = self.mesh, f"loading {self.path}"
        part = on_all_ranks(mesh, action, lambda: self.source.part_for(state, self._order(is_in_order)))
        metadata = part.metadata
        unexpected = _unexpected(state, metadata, mesh)
        absent = not_begun(state, metadata.state_dict_metadata, alike)
        wanted = {key: value for key, value in state.items() if key not in absent}
        missing = on_all_ranks(mesh, action, lambda: _missing(wanted, metadata, unexpected, strict))
        wanted = {key: value for key, value in wanted.items() if key not in missing}
        own = own_key(mesh)
        is_own = dict(self.source.layout) == asdict(mesh.layout) and own in metadata.state_dict_metadata
        if is_own:
            wanted[own] = None
        on_all_ranks(mesh, action, lambda: part.read(wanted))
        per_rank = wanted.pop(own) if is_own else None
        state.update(wanted)
        return Loaded(self.meta, self.source.layout, per_rank, tuple(missing), tuple(absent), tuple(unexpected))

    def _order(self, is_in_order: bool) -> Order:
        of_stages: Order = "definition" if is_in_order else "unknown"
        return "groups" if self.mesh.pp.size == 1 else of_stages

    def names_with_state(self, index: int, groups: Any, is_in_order: bool) -> set[str]:
        """Global names of the parameters whose state of an optimizer was saved.

        Args:
            index: number of the optimizer in the module.
            groups: its saved groups, as :meth:`fill` has filled them.
            is_in_order: see :meth:`fill`.
        """
        asked: State = {groups_key(index): groups, state_key(index, "", MAIN): None}
        keys = map(Key.parse, self.source.part_for(asked, self._order(is_in_order)).metadata.state_dict_metadata)
        return {key.name for key in keys if key.family == optimizer_family(index) and key.state and not key.is_main}

    def tensors(self) -> dict[str, LazyTensor]:
        """Lazy tensors by key, in one process."""
        part, found = self.source.part_for({}, "groups"), {}
        for key, entry in part.metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata) and not Key.parse(key).is_calibration:
                shape, dtype = tuple(entry.size), entry.properties.dtype
                found[key] = LazyTensor(shape, dtype, partial(self._tensor, part, key, shape, dtype))
        return found

    def _tensor(self, part: Directory | FilePart, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        whole = torch.empty(shape, dtype=dtype)
        chunk = Chunk(Box.whole(shape), whole, write=False)
        try:
            part.read({key: Fragment(shape, dtype, (chunk,))})
        except Exception as error:  # a damaged archive may raise anything
            raise CheckpointError(f"{self.path}: {key} cannot be read: {error}") from None
        return whole


def open_checkpoint(
    path: str | os.PathLike[str],
    mesh: ParallelMesh | None = None,
    *,
    weights_only: bool = True,
    check: Check = "hashes",
) -> OpenCheckpoint:
    """Open a checkpoint of any layout, or a single file of Lightning's. Every rank must call this.

    Args:
        path: directory or file; one that is open already is read again only as far as ``check`` requires.
        mesh: ranks that read it together; ``None`` for this process alone.
        weights_only: True to refuse a ``meta.pt`` that holds objects.
        check: ``"hashes"`` to compare the content of all files with the manifest, divided over the ranks; ``"sizes"``
            to compare lengths, and the content of the files that every rank reads.

    Raises:
        CheckpointError: on every rank, if the checkpoint is not one, or is damaged.
    """
    known = path if isinstance(path, OpenCheckpoint) and path.stamp == _stamp(path.path) else None
    path, mesh = Path(path), mesh or ParallelMesh.single()
    action = f"loading {path}"

    on_all_ranks(mesh, action, lambda: recover(path) if mesh.rank == 0 and known is None else None)
    manifest, faults = compared(path, mesh, check, None if known is None else known.manifest)
    if faults:
        raise CheckpointError(f"{action}: the checkpoint is damaged:\n{listed(faults)}")

    def open_it() -> OpenCheckpoint:
        if known is not None:
            return replace(known, mesh=mesh)
        stamp = _stamp(path)
        if manifest is None:
            opened: Directory | SingleFile = SingleFile.open(path, weights_only)
        else:
            opened = Directory.open(path, manifest.layout, weights_only)
        if wrong := type_faults(opened.meta):
            raise CheckpointError(f"the Trainer's state in it is damaged: {'; '.join(wrong)}")
        return OpenCheckpoint(path, mesh, opened, manifest, stamp)

    return on_all_ranks(mesh, action, open_it)


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Identity of the file that is written last: the manifest, or a single file; ``None`` if there is none."""
    with suppress(OSError):
        found = (path if path.is_file() else path / MANIFEST).stat()
        return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
    return None


def load(
    path: str | os.PathLike[str],
    state: State,
    mesh: ParallelMesh,
    *,
    strict: bool = True,
    weights_only: bool = True,
    check: Check = "hashes",
    is_in_order: bool = True,
) -> Loaded:
    """Open a checkpoint and fill a state; arguments are those of :func:`open_checkpoint` and :class:`OpenCheckpoint`.

    Raises:
        CheckpointError: on every rank, if the checkpoint is not one, is damaged, or does not fit.
    """
    opened = open_checkpoint(path, mesh, weights_only=weights_only, check=check)
    return opened.fill(state, strict=strict, is_in_order=is_in_order)


def _missing(state: State, metadata: Metadata, unexpected: Sequence[str], strict: bool) -> list[str]:
    """Keys that the checkpoint lacks.

    Raises:
        CheckpointError: if it does not fit.
    """
    missing, faults = load_faults(state, metadata)
    words = ""
    if strict:
        needed = [key for key in missing if not Key.parse(key).is_calibration]
        faults = _missing_faults(needed, list(metadata.state_dict_metadata)) + faults
        where = ("optimizer", "model")
        faults += [f"{key}: in the checkpoint, but not in the {where[Key.parse(key).is_model]}" for key in unexpected]
        kinds = {"Missing": needed, "Unexpected": unexpected}
        words = "".join(f", {kind} key(s) in state_dict" for kind, keys in kinds.items() if keys)
    if faults:
        raise CheckpointError(f"the checkpoint does not fit{words}:\n{listed(faults)}")
    return missing


def _unexpected(state: State, metadata: Metadata, mesh: ParallelMesh) -> list[str]:
    """Keys that no rank requests: of the model, if any requests it, and of kinds of state of requested optimizers."""
    is_source = mesh.tp.rank == mesh.dp_cp.rank == 0
    requested: set[str] = set().union(*all_gather_object(mesh, sorted(state) if is_source else []))
    wanted = [Key.parse(key) for key in requested]
    has_model = any(key.is_model for key in wanted)
    families, kinds = {key.family for key in wanted}, {(key.family, key.state) for key in wanted}
    return [
        text
        for text in metadata.state_dict_metadata
        if ((key := Key.parse(text)).is_model and has_model and text not in requested and not key.is_calibration)
        or (key.state and key.family in families and (key.family, key.state) not in kinds)
    ]


def _missing_faults(missing: list[str], known: list[str]) -> list[str]:
    faults = []
    for family in dict.fromkeys(Key.parse(key).family for key in missing):
        ours = [key for key in missing if Key.parse(key).family == family]
        theirs = [key for key in known if Key.parse(key).family == family]
        if theirs:
            nearest = {key: ", ".join(nearest_names(key, theirs)[:3]) for key in ours[:_SHOWN]}
            faults += [f"{key}: not in the checkpoint; nearest: {nearest.get(key)}" for key in ours]
        else:
            there = ", ".join(dict.fromkeys(Key.parse(key).family for key in known)) or "nothing"
            faults.append(f"{family}: the checkpoint has none of it, only: {there} (saved with save_weights_only?)")
    return faults
