"""Is a checkpoint what was written? Reads the files, needs no processes, no model and no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lightning_megatron.checkpoint.manifest import MANIFEST, Manifest, read_manifest, record


def verify(path: str | os.PathLike[str]) -> list[str]:
    """Faults of a checkpoint directory in words, each with its file; empty if every byte is as it was written."""
    path = Path(path)
    if not path.is_dir():
        return [f"{path}: not a directory"]
    if not (path / MANIFEST).is_file():
        return [f"{MANIFEST}: missing"]
    try:
        manifest = read_manifest(path)
    except (OSError, ValueError) as error:
        return [f"{MANIFEST}: {error}"]
    names = sorted(manifest.files)
    return size_faults(path, manifest) or hash_faults(path, manifest, names)


def size_faults(path: Path, manifest: Manifest) -> list[str]:
    """Files that are missing, of another length, or not in the manifest."""
    faults = []
    for name, expected in sorted(manifest.files.items()):
        file = path / name
        if not file.is_file():
            faults.append(f"{name}: missing")
        elif (size := file.stat().st_size) != expected.bytes:
            how = "truncated" if size < expected.bytes else "longer than written"
            faults.append(f"{name}: {how}: {size} bytes, {expected.bytes} were written")
    known = {*manifest.files, MANIFEST}
    return faults + [
        f"{entry.name}: not in the manifest" for entry in sorted(path.iterdir()) if entry.name not in known
    ]


def hash_faults(path: Path, manifest: Manifest, names: Sequence[str]) -> list[str]:
    """Files among ``names`` whose content is not what was written."""
    return [
        f"{name}: altered: its hash is not the one that was written"
        for name in names
        if record(path / name) != manifest.files[name]
    ]
