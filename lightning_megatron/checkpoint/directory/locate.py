"""Is there a checkpoint at a path? If not, what is there instead."""

from __future__ import annotations

import os
from pathlib import Path

from lightning_megatron.checkpoint.directory.atomic_dir import UNFINISHED, unfinished_of
from lightning_megatron.checkpoint.integrity.manifest import MANIFEST, Manifest, read_manifest
from lightning_megatron.errors import CheckpointError, MissingCheckpointError, nearest_names


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """True if a path looks like a checkpoint of this package, good or damaged."""
    return (Path(path) / MANIFEST).is_file()


def locate(path: Path) -> Manifest:
    """The manifest of the checkpoint at ``path``.

    Raises:
        CheckpointError: if there is none, saying what is there and what to do.
    """
    if path.parent.name == UNFINISHED:
        raise CheckpointError("it was never completed: a save was interrupted, or is under way. Use another one")
    if path.is_file():
        raise CheckpointError("it is a single file, which has no manifest")
    if not path.is_dir():
        raise MissingCheckpointError(_absent(path))
    if not (path / MANIFEST).is_file():
        raise CheckpointError(f"it is no checkpoint of this package: it has no {MANIFEST}{_looks_like(path)}")
    try:
        return read_manifest(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{MANIFEST}: {error}") from None


def _absent(path: Path) -> str:
    text = "it does not exist"
    if not path.parent.is_dir():
        return f"{text}, nor does {path.parent}"
    if any(name.kind == "saving" for _, name in unfinished_of(path)):
        text += "; a save under this name was interrupted before it was complete"
    others = sorted(entry.name for entry in path.parent.iterdir() if (entry / MANIFEST).is_file())
    if not others:
        return f"{text}; {path.parent} holds no checkpoint"
    return f"{text}; checkpoints there: {', '.join(nearest_names(path.name, others)[:5])}"


def _looks_like(path: Path) -> str:
    names = {entry.name for entry in path.iterdir()}
    if ".metadata" in names:
        return ", but files of torch.distributed.checkpoint: it was written by another program"
    if "config.json" in names:
        return ", but a config.json: it looks like a Hugging Face model"
    return ""
