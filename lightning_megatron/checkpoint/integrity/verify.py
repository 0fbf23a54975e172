"""Verification of a checkpoint directory from its files alone, without processes and without a model."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata

from lightning_megatron.checkpoint.directory.atomic_dir import UNFINISHED
from lightning_megatron.checkpoint.integrity.fault import Fault
from lightning_megatron.checkpoint.integrity.manifest import MANIFEST, Manifest, read_manifest, record
from lightning_megatron.checkpoint.integrity.metadata import Item, content_faults, damaged, items_of
from lightning_megatron.checkpoint.integrity.metadata_file import METADATA, read_metadata
from lightning_megatron.checkpoint.meta import META, read_meta
from lightning_megatron.errors import CheckpointError


def verify(path: str | os.PathLike[str]) -> list[Fault]:
    """Faults of a checkpoint directory; none if every byte is as it was written and nothing is missing.

    Lengths and hashes come first. If they are right, the content is checked: every tensor is covered once, every
    parameter has its optimizer state, ``meta.pt`` loads without running code.
    """
    path = Path(path)
    if not path.is_dir():
        return [Fault(path.name, "a single file, not a directory" if path.is_file() else "not a directory")]
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
    except Exception as error:  # what torch raises for a file that is none of its own is not promised
        faults.append(Fault(META, f"cannot be read: {error}"))
    try:
        metadata = read_metadata(path)
    except CheckpointError as error:
        return [*faults, Fault(METADATA, str(error))]
    return faults + content_faults(path, metadata, lengths)


def item_faults(path: Path, metadata: Metadata, names: Collection[str]) -> list[Fault]:
    """Tensors in files among ``names`` whose check sums, made from memory, do not match the disk."""
    bad: dict[str, list[str]] = {}
    for item in items_of(metadata):
        if item.file in names and damaged(path, item):
            bad.setdefault(item.file, []).append(item.key)
    return [Fault(name, "a check sum is wrong", tuple(dict.fromkeys(keys))) for name, keys in bad.items()]


def _with_tensors(path: Path, faults: list[Fault]) -> list[Fault]:
    """The faults with the tensors that they concern, as far as the rest of the checkpoint still tells."""
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
