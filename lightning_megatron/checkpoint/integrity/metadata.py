"""What ``.metadata`` says that a checkpoint holds, and whether that is all there should be.

Where an item lies is told by ``Metadata.storage_data``, whose values are :class:`~.metadata_file.Place`.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_megatron.checkpoint.fragment import cover_fault
from lightning_megatron.checkpoint.integrity.fault import Fault
from lightning_megatron.checkpoint.integrity.metadata_file import METADATA
from lightning_megatron.params import Box


@dataclass(frozen=True)
class Item:
    """A box of a tensor, or another value, and where it lies.

    Attributes:
        key: name in the checkpoint.
        offsets: of the box; ``None`` for a value that is no tensor.
        file: name of the file.
        start: its first byte.
        end: one past its last.
    """

    key: str
    offsets: tuple[int, ...] | None
    file: str
    start: int
    end: int


def items_of(metadata: Metadata) -> list[Item]:
    """Everything that is stored, by file and place."""
    found = []
    for index, place in (metadata.storage_data or {}).items():
        offsets = None if index.offset is None else tuple(index.offset)
        found.append(Item(index.fqn, offsets, place.relative_path, place.offset, place.offset + place.length))
    return sorted(found, key=lambda item: (item.file, item.start))


def damaged(path: Path, item: Item) -> bool:
    """True if the bytes of an item are not what ``torch.save`` wrote: its archive has a check sum for each part."""
    if not (path / item.file).is_file():  # a pipe would wait to be opened
        return True
    try:
        with (path / item.file).open("rb") as stream:
            stream.seek(item.start)
            content = stream.read(item.end - item.start)
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return len(content) != item.end - item.start or archive.testzip() is not None
    except Exception:  # a broken archive makes zipfile and its decoders raise what they like
        return True


def content_faults(path: Path, metadata: Metadata, lengths: Mapping[str, int]) -> list[Fault]:
    """What is missing or too much in a checkpoint whose files are as they were written.

    Args:
        path: the checkpoint.
        metadata: what it says of itself.
        lengths: bytes of each of its files.
    """
    return _cover_faults(metadata) + _place_faults(metadata, lengths) + _optimizer_faults(path, metadata)


def _cover_faults(metadata: Metadata) -> list[Fault]:
    """Every tensor must be covered by its boxes exactly once."""
    faults = []
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
            if what := cover_fault(tuple(entry.size), boxes):
                faults.append(Fault(METADATA, what, (key,)))
    return faults


def _place_faults(metadata: Metadata, lengths: Mapping[str, int]) -> list[Fault]:
    """Every box must lie in a file, inside it, and in a place of its own."""
    items = items_of(metadata)
    stored = {(item.key, item.offsets) for item in items}
    faults = []
    for key, entry in metadata.state_dict_metadata.items():
        is_tensor = isinstance(entry, TensorStorageMetadata)
        places = [tuple(chunk.offsets) for chunk in entry.chunks] if is_tensor else [None]  # type: ignore[union-attr]
        if not stored.issuperset((key, place) for place in places):
            faults.append(Fault(METADATA, "no file is named for some of it", (key,)))
    end_of: dict[str, int] = {}
    for item in items:
        if item.file not in lengths:
            faults.append(Fault(item.file, "named as holding tensors, but not in the manifest", (item.key,)))
        elif item.end > lengths[item.file]:
            faults.append(Fault(item.file, f"should reach to byte {item.end}", (item.key,)))
        if item.start < end_of.get(item.file, 0):
            faults.append(Fault(item.file, f"two things lie at byte {item.start}", (item.key,)))
        end_of[item.file] = item.end
    return faults


def _optimizer_faults(path: Path, metadata: Metadata) -> list[Fault]:
    """Every parameter in an optimizer's groups must have all that the optimizer keeps, in the parameter's shape."""
    entries = metadata.state_dict_metadata
    shapes = {key: tuple(e.size) for key, e in entries.items() if isinstance(e, TensorStorageMetadata)}
    families = sorted({key.partition(".")[0] for key in entries if key.startswith("optimizer_")})
    faults = []
    for family in families:
        item = next((item for item in items_of(metadata) if item.key == f"{family}.param_groups"), None)
        if item is None:
            faults.append(Fault(METADATA, f"{family} has no param_groups", (f"{family}.param_groups",)))
            continue
        try:
            names = {name for group in _value(path, item) for name in group["params"]}
        except Exception as error:  # whatever was written there instead
            faults.append(Fault(item.file, f"cannot be read: {error}", (item.key,)))
            continue
        faults += _state_faults(family, names, shapes)
    return faults


def _state_faults(family: str, names: set[str], shapes: Mapping[str, tuple[int, ...]]) -> list[Fault]:
    prefix = f"{family}.state."
    states: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, shape in shapes.items():
        if key.startswith(prefix):
            name, _, state = key.removeprefix(prefix).rpartition(".")
            states.setdefault(name, {})[state] = shape
    kinds = {state for kept in states.values() for state in kept}
    # A name of a group that the model does not have is another name of a tied parameter.
    expected = {name for name in names if f"model.{name}" in shapes}
    faults = []
    for name in sorted(expected | states.keys()):
        kept = states.get(name, {})
        absent = tuple(f"{prefix}{name}.{state}" for state in sorted(kinds - kept.keys())) or (
            () if kept else (f"{prefix}{name}",)
        )
        if f"model.{name}" not in shapes:
            faults.append(Fault(METADATA, "optimizer state of a parameter that is not there", (f"model.{name}",)))
        elif name not in names:
            faults.append(Fault(METADATA, f"is in no group of {family}", (f"model.{name}",)))
        elif absent:
            faults.append(Fault(METADATA, "optimizer state is missing", absent))
        whole = shapes.get(f"model.{name}")
        other = tuple(f"{prefix}{name}.{state}" for state, size in kept.items() if size not in ((), whole))
        if whole is not None and other:
            faults.append(Fault(METADATA, f"not of the parameter's shape {whole}", other))
    return faults


def _value(path: Path, item: Item) -> Sequence[Mapping[str, Any]]:
    with (path / item.file).open("rb") as stream:
        stream.seek(item.start)
        content = stream.read(item.end - item.start)
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
