"""``.metadata``, the table of contents that torch.distributed.checkpoint writes: read without trusting it.

The file is a pickle, and torch reads it with plain ``pickle.load``, which runs whatever a file tells it to. Here
nothing that it names is imported or called: every name becomes an inert :class:`PickledObject`, and the table is
rebuilt from those, field by field, with the type of each checked. Files must lie in the checkpoint's own directory.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_megatron.checkpoint.integrity.manifest import is_plain_name
from lightning_megatron.errors import CheckpointError

METADATA = ".metadata"

_DCP = "torch.distributed.checkpoint"
_DTYPES = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_KNOWN = {
    *_DTYPES,
    "torch.Size",
    "torch.serialization._get_layout",
    f"{_DCP}.filesystem._StorageInfo",
    *(
        f"{_DCP}.metadata.{name}"
        for name in (
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
            "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        )
    ),
    *(f"{module}.PosixPath" for module in ("pathlib", "pathlib._local")),
}  # fmt: skip
"""All that torch.distributed.checkpoint has named in this file from torch 2.6 to 2.13."""


@dataclass(frozen=True)
class Place:
    """Bytes of an item; the fields are those that DCP's ``FileSystemReader`` looks for.

    Attributes:
        relative_path: name of a file of the directory.
        offset: its first byte.
        length: number of bytes.
        transform_descriptors: names of compressions; always ``None``, since none is supported.
    """

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


class _Sealed(type):
    """Metaclass of classes that cannot be changed: a pickle may set attributes of a class that it names."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"sets {name} of a class")


class PickledObject(metaclass=_Sealed):
    """An object of the file: module and name of its class, positional arguments, and the state to be set."""

    name = ""
    given: tuple[Any, ...]
    state: Any

    def __new__(cls, *given: Any, **_: Any) -> PickledObject:
        """Keep the arguments: a pickle makes objects with and without calling their class."""
        record = super().__new__(cls)
        record.given, record.state = given, None
        return record

    def __init__(self, *given: Any, **_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Reader(pickle.Unpickler):
    """An unpickler that resolves every name to a class of inert records."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self.classes: dict[str, type[PickledObject]] = {}

    def find_class(self, module: str, name: str) -> type[PickledObject]:
        """A class of records, the same one for the same name."""
        full = f"{module}.{name}"
        if full not in self.classes:
            made: Any = _Sealed(name, (PickledObject,), {"name": full})
            self.classes[full] = made
        return self.classes[full]


def read_metadata(directory: Path, *, only_known: bool = True) -> Metadata:
    """Names, shapes and places of everything in a checkpoint.

    Args:
        directory: the checkpoint.
        only_known: True to refuse a file with names that torch does not write; False to leave out such objects.

    Raises:
        CheckpointError: if the file is not there, is no such table, names anything else, or leads out of the directory.
    """
    file = directory / METADATA
    if file.exists() and not file.is_file():  # a pipe would wait to be opened
        raise CheckpointError(f"{file}: no ordinary file")
    try:
        with file.open("rb") as stream:
            reader = _Reader(stream)
            root = reader.load()
        if only_known and (unknown := sorted(reader.classes.keys() - _KNOWN)):
            raise ValueError(f"it names {', '.join(unknown)}, which no checkpoint needs")
        return _metadata(root)
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(f"{file}: cannot be read: {type(error).__name__}: {error}") from None


def _metadata(root: Any) -> Metadata:
    fields = _fields(root, "Metadata")
    entries = _dict(fields["state_dict_metadata"])
    places = _dict(fields.get("storage_data") or {})
    return Metadata(
        {_text(key): _entry(entry) for key, entry in entries.items()},
        storage_data={_index(index): _place(place) for index, place in places.items()},
    )


def _entry(entry: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if _is(entry, "BytesStorageMetadata"):
        return BytesStorageMetadata()
    fields = _fields(entry, "TensorStorageMetadata")
    return TensorStorageMetadata(
        TensorProperties(dtype=_dtype(fields["properties"])),
        _size(fields["size"]),
        [_chunk(chunk) for chunk in _list(fields["chunks"])],
    )


def _chunk(chunk: Any) -> ChunkStorageMetadata:
    fields = _fields(chunk, "ChunkStorageMetadata")
    return ChunkStorageMetadata(_size(fields["offsets"]), _size(fields["sizes"]))


def _index(index: Any) -> MetadataIndex:
    fields = _fields(index, "MetadataIndex")
    offset, number = fields.get("offset"), fields.get("index")
    place = None if offset is None else _size(offset)
    return MetadataIndex(_text(fields["fqn"]), place, None if number is None else _whole(number))


def _place(place: Any) -> Place:
    fields = _fields(place, "_StorageInfo")
    if fields.get("transform_descriptors"):
        raise ValueError("its files are compressed, which this package does not read")
    name = _text(fields["relative_path"])
    if not is_plain_name(name):
        raise ValueError(f"{name[:100]!r} is no file of the checkpoint's own directory")
    return Place(name, _whole(fields["offset"]), _whole(fields["length"]))


def _dtype(properties: Any) -> torch.dtype:
    """The dtype, which is the first field of the pickled ``TensorProperties``."""
    if not _is(properties, "TensorProperties"):
        raise TypeError(f"{_kind(properties)} stands where TensorProperties should")
    state = properties.state
    named = state[0] if isinstance(state, tuple) and state else _dict(state).get("dtype")
    if isinstance(named, type) and issubclass(named, PickledObject) and named.name in _DTYPES:
        return _DTYPES[named.name]
    raise TypeError(f"{_kind(named)} is no dtype")


def _size(size: Any) -> torch.Size:
    values = size.given[0] if _is(size, "Size") and len(size.given) == 1 else size
    if not isinstance(values, tuple | list):
        raise TypeError(f"{_kind(size)} is no shape")
    return torch.Size([_whole(value) for value in values])


def _is(value: Any, name: str) -> bool:
    return isinstance(value, PickledObject) and value.name.rpartition(".")[2] == name


def _fields(value: Any, name: str) -> dict[Any, Any]:
    if not _is(value, name):
        raise TypeError(f"{_kind(value)} stands where {name} should")
    return _dict(value.state or {})


def _checked(kind: type) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if type(value) is not kind:
            raise TypeError(f"{_kind(value)} stands where {kind.__name__} should")
        return value

    return check


_dict, _list, _text = _checked(dict), _checked(list), _checked(str)


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        shown = value if type(value) is float or (type(value) is int and value.bit_length() < 64) else _kind(value)
        raise TypeError(f"{shown} stands where a number of elements or bytes should")
    return value


def _kind(value: Any) -> str:
    """The name of a value's class: the value itself may be too large to print."""
    return value.name if isinstance(value, PickledObject) else type(value).__name__
