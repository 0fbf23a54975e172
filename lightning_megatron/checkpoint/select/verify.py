"""Verification of a checkpoint directory from its files alone, without collectives and without a model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lightning_megatron.checkpoint.directory.atomic_dir import UNFINISHED
from lightning_megatron.checkpoint.formats.lightning_file import SingleFile, record_faults
from lightning_megatron.checkpoint.formats.meta import META, read_meta
from lightning_megatron.checkpoint.integrity.fault import Fault
from lightning_megatron.checkpoint.integrity.manifest import MANIFEST, Manifest, read_manifest, record
from lightning_megatron.checkpoint.integrity.metadata import Item, content_faults, damaged, items_of
from lightning_megatron.checkpoint.integrity.metadata_file import METADATA, read_metadata
from lightning_megatron.errors import CheckpointError
from lightning_megatron.mesh import ParallelMesh


def verify(path: str | os.PathLike[str]) -> list[Fault]:
    """Faults of a checkpoint; none if every byte is as it was written and nothing is missing.

    Lengths and hashes come first. If they are right, the content is checked: every tensor is covered once, every
    parameter has its optimizer state, ``meta.pt`` loads without running code. A single file has checksums inside.
    """
    path = Path(path)
    if path.is_file():
        return _file_faults(path)
    if not path.is_dir():
        return [Fault(path.name, "not there")]
    if path.parent.name == UNFINISHED:
        return [Fault(path.name, "never completed: a save was interrupted, or is under way")]
    if not (path / MANIFEST).is_file():
        return [Fault(MANIFEST, "missing")]
    try:
        manifest = read_manifest(path)
    except (OSError, ValueError) as error:
        return [Fault(MANIFEST, str(error))]
    faults = size_faults(path, manifest)
    at_fault = {fault.file for fault in faults}
    faults += hash_faults(path, manifest, [name for name in sorted(manifest.files) if name not in at_fault])
    return _with_tensors(path, faults) if faults else metadata_faults(path, manifest)


def _file_faults(path: Path) -> list[Fault]:
    """Faults of a single file of Lightning's, by the checksums in it."""
    try:
        faults = record_faults(path, 0, 1)
        SingleFile.open(path, weights_only=True)
    except CheckpointError as error:
        return [Fault(path.name, str(error))]
    return faults


def written_faults(directory: Path, mesh: ParallelMesh) -> list[Fault]:
    """Faults of a checkpoint that has just been written. Ranks divide the files, without collectives.

    Each rank reads the files of its neighbour, which detects file systems that hide one rank's files from another. The
    hashes were computed from the bytes in memory, so a match shows that the files hold the same.
    """
    manifest = read_manifest(directory)
    names = sorted(manifest.files)[(mesh.rank + 1) % mesh.world.size :: mesh.world.size]
    faults = size_faults(directory, manifest) if mesh.rank == 0 else []
    faults = faults or hash_faults(directory, manifest, names)
    if faults:
        return _with_tensors(directory, faults)
    return metadata_faults(directory, manifest) if mesh.rank == 0 else []


def size_faults(path: Path, manifest: Manifest) -> list[Fault]:
    """Files that are missing, of another length, or not in the manifest."""
    faults = []
    for name, expected in sorted(manifest.files.items()):
        file = path / name
        if not file.is_file():
            faults.append(Fault(name, "missing"))
        elif (size := file.stat().st_size) != expected.bytes:
            how = "truncated" if size < expected.bytes else "longer than written"
            faults.append(Fault(name, f"{how}: {size} bytes, {expected.bytes} were written"))
    known = {*manifest.files, MANIFEST}
    return faults + [
        Fault(entry.name, "not in the manifest") for entry in sorted(path.iterdir()) if entry.name not in known
    ]


def hash_faults(path: Path, manifest: Manifest, names: Sequence[str]) -> list[Fault]:
    """Files among ``names`` whose content differs from what was written."""
    return [
        Fault(name, "altered: its hash is not the one that was written")
        for name in names
        if record(path / name) != manifest.files[name]
    ]


def metadata_faults(path: Path, manifest: Manifest) -> list[Fault]:
    """Faults of ``meta.pt`` and of the table of contents: nothing may be missing."""
    lengths = {name: entry.bytes for name, entry in manifest.files.items()}
    faults = [Fault(name, "missing in the manifest") for name in (METADATA, META) if name not in lengths]
    if faults:
        return faults
    try:
        read_meta(path, weights_only=True)
    except CheckpointError:
        faults.append(Fault(META, "holds objects: it loads only with weights_only=False"))
    except Exception as error:  # torch does not document what it raises for other files
        faults.append(Fault(META, f"cannot be read: {error}"))
    try:
        metadata = read_metadata(path)
    except CheckpointError as error:
        return [*faults, Fault(METADATA, str(error))]
    return faults + content_faults(path, metadata, lengths)


def _with_tensors(path: Path, faults: list[Fault]) -> list[Fault]:
    """The faults with the tensors that they concern, as far as ``.metadata`` can still be read."""
    if any(fault.file == METADATA for fault in faults):
        return faults
    try:
        items = items_of(read_metadata(path))
    except CheckpointError:
        return faults
    by_file: dict[str, list[Item]] = {}
    for item in items:
        by_file.setdefault(item.file, []).append(item)
    found = []
    for fault in faults:
        held = by_file.get(fault.file, [])
        # If every tensor is sound by itself, the file belongs to another checkpoint, and all of its tensors are wrong.
        concerned = [item for item in held if damaged(path, item)] or held
        found.append(Fault(fault.file, fault.what, tuple(dict.fromkeys(item.key for item in concerned))))
    return found
