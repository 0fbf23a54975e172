"""Checkpoints of Megatron at a path: the last iteration, and its format."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from lightning_megatron.checkpoint.formats.hf.directory import read_json_object
from lightning_megatron.checkpoint.formats.megatron.legacy import MegatronCheckpoint, read_legacy
from lightning_megatron.checkpoint.formats.megatron.torch_dist import COMMON, read_torch_dist
from lightning_megatron.checkpoint.formats.megatron.unpickle import command_line, load_file
from lightning_megatron.checkpoint.integrity.manifest import MANIFEST
from lightning_megatron.errors import CheckpointError

_LATEST = "latest_checkpointed_iteration.txt"
_METADATA = "metadata.json"
_RANKS = "mp_rank_*"
_LONGEST = 64  # bytes of the file that names the last iteration


def is_megatron_directory(path: str | os.PathLike[str]) -> bool:
    """True if a path is a checkpoint of Megatron, or a folder of its checkpoints, and not one of this package."""
    if (Path(path) / MANIFEST).exists():
        return False
    try:
        directory = iteration_directory(Path(path))
    except CheckpointError:
        return True  # it is one, and reading it names the fault
    return (directory / _METADATA).is_file() or any(directory.glob(_RANKS))


def iteration_directory(path: Path) -> Path:
    """The folder of the last iteration if ``path`` holds several, else ``path``.

    Raises:
        CheckpointError: if the file that names the last iteration is damaged, or names one that is not there.
    """
    tracker = path / _LATEST
    if not tracker.is_file():
        return path
    with tracker.open("rb") as stream:
        text = stream.read(_LONGEST).decode("ascii", "replace").strip()
    if text != "release" and not re.fullmatch(r"\d{1,18}", text, re.ASCII):
        raise CheckpointError(f"{tracker} should hold a number or the word release, and holds {text[:20]!r}")
    found = path / (text if text == "release" else f"iter_{int(text):07d}")
    if not found.is_dir():
        raise CheckpointError(f"{tracker} names {found.name}, which is not there")
    return found


def open_megatron(path: str | os.PathLike[str], *, allow_pickle: bool = False) -> MegatronCheckpoint:
    """Open a checkpoint in either format.

    Args:
        path: the folder that training saved to, or that of one iteration.
        allow_pickle: True to read files with Megatron's command line: those of the format ``torch``, and ``common.pt``.

    Raises:
        CheckpointError: if there is none, it has another format, it is damaged, or it needs ``allow_pickle``.
    """
    directory = iteration_directory(Path(path))
    if (directory / _METADATA).is_file():
        _refuse_other_backend(directory / _METADATA)
        return MegatronCheckpoint(read_torch_dist(directory), _common_arguments(directory, allow_pickle))
    if any(directory.glob(_RANKS)):
        return read_legacy(directory, allow_pickle=allow_pickle)
    raise CheckpointError(f"{directory} is no checkpoint of Megatron: it has neither {_METADATA} nor {_RANKS}")


def _refuse_other_backend(file: Path) -> None:
    backend = read_json_object(file).get("sharded_backend")
    if backend != "torch_dist":
        raise CheckpointError(f"{file}: the format is {backend!r}; torch_dist and torch can be read")


def _common_arguments(directory: Path, allow_pickle: bool) -> dict[str, Any] | None:
    if not allow_pickle or not os.path.lexists(directory / COMMON):
        return None
    if not (directory / COMMON).is_file():
        raise CheckpointError(f"{directory / COMMON} is no ordinary file")
    return command_line(load_file(directory / COMMON, allow_pickle=True), directory / COMMON)
