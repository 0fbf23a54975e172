"""The items that ``.metadata`` lists, and checks that they are complete.

``Metadata.storage_data`` maps each item to its place in a file, a :class:`~.metadata_file.Place`.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_megatron.checkpoint.integrity.fault import Fault
from lightning_megatron.checkpoint.integrity.metadata_file import METADATA
from lightning_megatron.checkpoint.tensors.fragment import cover_fault
from lightning_megatron.checkpoint.tensors.keys import Key, groups_of, model_key
from lightning_megatron.params import Box


@dataclass(frozen=True)
class Item:
    """A box of a tensor, or another value, and its place in a file.

    Attributes:
        key: key in the checkpoint.
        offsets: offsets of the box; ``None`` for a value that is no tensor.
        file: name of the file.
        start: first byte.
        end: one past the last byte.
    """

    key: str
    offsets: tuple[int, ...] | None
    file: str
    start: int
    end: int


def items_of(metadata: Metadata) -> list[Item]:
    """All stored items, sorted by file and place."""
    found = []
    for index, place in (metadata.storage_data or {}).items():
        offsets = None if index.offset is None else tuple(index.offset)
        found.append(Item(index.fqn, offsets, place.relative_path, place.offset, place.offset + place.length))
    return sorted(found, key=lambda item: (item.file, item.start))


def damaged(path: Path, item: Item) -> bool:
    """True if the bytes of an item differ from what ``torch.save`` wrote, by the check sums of its archive."""
    if not (path / item.file).is_file():  # a pipe would wait to be opened
        return True
    try:
        content = _content(path, item)
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return len(content) != item.end - item.start or archive.testzip() is not None
    except Exception:  # zipfile and its decoders may raise anything for a broken archive
        return True


def content_faults(path: Path, metadata: Metadata, lengths: Mapping[str, int]) -> list[Fault]:
    """Missing and surplus items of a checkpoint whose files are intact; ``lengths`` are their bytes."""
    return _cover_faults(metadata) + _place_faults(metadata, lengths) + _optimizer_faults(path, metadata)


def _cover_faults(metadata: Metadata) -> list[Fault]:
    """Tensors that their boxes do not cover exactly once."""
    faults = []
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
            if what := cover_fault(tuple(entry.size), boxes):
                faults.append(Fault(METADATA, what, (key,)))
    return faults


def _place_faults(metadata: Metadata, lengths: Mapping[str, int]) -> list[Fault]:
    """Boxes without a file, beyond the end of their file, or overlapping another one."""
    items = items_of(metadata)
    stored = {(item.key, item.offsets) for item in items}
    faults = []
    for key, entry in metadata.state_dict_metadata.items():
        is_tensor = isinstance(entry, TensorStorageMetadata)
        places = [tuple(chunk.offsets) for chunk in entry.chunks] if is_tensor else [None]  # type: ignore[union-attr]
        if not stored.issuperset((key, place) for place in places):
            faults.append(Fault(METADATA, "no file is listed for a part of it", (key,)))
    end_of: dict[str, int] = {}
    for item in items:
        if item.file not in lengths:
            faults.append(Fault(item.file, "named as holding tensors, but not in the manifest", (item.key,)))
        elif item.end > lengths[item.file]:
            faults.append(Fault(item.file, f"should reach to byte {item.end}", (item.key,)))
        if item.start < end_of.get(item.file, 0):
            faults.append(Fault(item.file, f"two items overlap at byte {item.start}", (item.key,)))
        end_of[item.file] = item.end
    return faults


def _optimizer_faults(path: Path, metadata: Metadata) -> list[Fault]:
    """Parameters in an optimizer's groups without all of its state, or with state of another shape."""
    entries = metadata.state_dict_metadata
    shapes = {key: tuple(e.size) for key, e in entries.items() if isinstance(e, TensorStorageMetadata)}
    families = sorted({key.family for key in map(Key.parse, entries) if key.is_optimizer})
    faults = []
    for family in families:
        item = next((item for item in items_of(metadata) if item.key == groups_of(family)), None)
        if item is None:
            faults.append(Fault(METADATA, f"{family} has no param_groups", (groups_of(family),)))
            continue
        try:
            groups = torch.load(io.BytesIO(_content(path, item)), map_location="cpu", weights_only=True)
            names = {name for group in groups for name in group["params"]}
        except Exception as error:  # whatever was written there instead
            faults.append(Fault(item.file, f"cannot be read: {error}", (item.key,)))
            continue
        faults += _state_faults(family, names, shapes)
    return faults


def _state_faults(family: str, names: set[str], shapes: Mapping[str, tuple[int, ...]]) -> list[Fault]:
    states = _shapes_of_state(family, shapes)
    kinds = {state for kept in states.values() for state in kept}
    # A name in a group that the model does not have is another name of a tied parameter.
    expected = {name for name in names if model_key(name) in shapes}
    if not kinds:
        return [Fault(METADATA, "optimizer state is missing", (f"{family}.state.{name}",)) for name in sorted(expected)]
    faults = []
    for name in sorted(expected | states.keys()):
        kept, key = states.get(name, {}), model_key(name)
        if key not in shapes:
            faults.append(Fault(METADATA, "optimizer state of a parameter that is not there", (key,)))
            continue
        if name not in names:
            faults.append(Fault(METADATA, f"is in no group of {family}", (key,)))
        elif absent := tuple(str(Key(family, name, state)) for state in sorted(kinds - kept.keys())):
            faults.append(Fault(METADATA, "optimizer state is missing", absent))
        whole = shapes[key]
        if other := tuple(str(Key(family, name, state)) for state, size in kept.items() if size not in ((), whole)):
            faults.append(Fault(METADATA, f"not of the parameter's shape {whole}", other))
    return faults


def _shapes_of_state(family: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Shapes of an optimizer's tensors, by parameter and kind of state."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, shape in shapes.items():
        parsed = Key.parse(key)
        if parsed.family == family and parsed.state:
            found.setdefault(parsed.name, {})[parsed.state] = shape
    return found


def _content(path: Path, item: Item) -> bytes:
    with (path / item.file).open("rb") as stream:
        stream.seek(item.start)
        return stream.read(item.end - item.start)
