"""Files in the format of safetensors: reads and writes the header, and parts of tensors at the offsets it lists.

A file is the length of the header (8 bytes, little-endian), the header as JSON, and the bytes of the tensors end to
end. The header follows from names, dtypes and shapes alone. So tensors can be written one by one, or each part of each
tensor by the rank that holds it, and the bytes of the file do not depend on which rank that was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_megatron.checkpoint.tensors.fragment import part_of
from lightning_megatron.checkpoint.tensors.lazy_tensor import LazyTensor
from lightning_megatron.errors import CheckpointError
from lightning_megatron.files.durable import sync_directory, sync_file
from lightning_megatron.params import Box

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes by their names in a header."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of each tensor of a file by name, in the order of its bytes."""


@dataclass(frozen=True)
class Entry:
    """A tensor of a file; ``start`` is its first byte, from the beginning of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        """Length in bytes."""
        return num_bytes(self.dtype, self.shape)


def num_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Length in bytes of a tensor of this dtype and shape."""
    return torch.Size(shape).numel() * dtype.itemsize


def header_bytes(layout: Layout) -> bytes:
    """The beginning of a file with these tensors, in this order and end to end."""
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, (dtype, shape) in layout.items():
        end = place + num_bytes(dtype, shape)
        content[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": (place, end)}
        place = end
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def read_entries(path: Path) -> dict[str, Entry]:
    """The tensors that the header of a file lists.

    Raises:
        CheckpointError: if it is no such file, or is truncated.
    """
    if not path.is_file():  # opening a pipe would wait for its other end
        raise CheckpointError(f"{path}: missing, or no ordinary file")
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
        found = {
            name: Entry(DTYPES[e["dtype"]], tuple(e["shape"]), 8 + length + e["data_offsets"][0])
            for name, e in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, OverflowError, MemoryError) as error:
        raise CheckpointError(f"{path}: truncated or no safetensors file: {error}") from None
    if path.stat().st_size < max((entry.start + entry.num_bytes for entry in found.values()), default=0):
        raise CheckpointError(f"{path}: truncated")
    return found


def read_lazily(path: Path) -> dict[str, LazyTensor]:
    """The tensors of a file that another program wrote; only the header is read, and checked against the file's length.

    Raises:
        CheckpointError: if it is no such file, is truncated, or holds a dtype that no model here has.
    """
    found = {}
    with _opened(path) as stream:
        for name in stream.keys():  # noqa: SIM118 - it is no mapping
            part = stream.get_slice(name)
            if (kind := part.get_dtype()) not in DTYPES:
                raise CheckpointError(f"{path}: {name} is of dtype {kind}, which no model of ours has")
            shape, dtype = tuple(part.get_shape()), DTYPES[kind]
            found[name] = LazyTensor(shape, dtype, partial(_read_whole, path, name), partial(_read_box, path, name))
    return found


def _read_whole(path: Path, name: str) -> Tensor:
    # The file is opened for each tensor, so that its mapping is freed with the tensor.
    with _opened(path) as stream:
        tensor: Tensor = stream.get_tensor(name)
        return tensor


def _read_box(path: Path, name: str, box: Box) -> Tensor:
    with _opened(path) as stream:
        ends = zip(box.offsets, box.sizes, strict=True)
        part: Tensor = stream.get_slice(name)[tuple(slice(start, start + size) for start, size in ends)]
        return part


def _opened(path: Path) -> Any:
    if not path.is_file():  # a pipe would wait to be opened
        raise CheckpointError(f"{path}: {'no ordinary file' if path.exists() else 'missing'}")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: truncated or no file of its kind: {error}") from None


def unfinished_path(path: Path) -> Path:
    """The path under which a file is written until it is complete."""
    return path.with_name(f".{path.name}.saving")


def create_unfinished(path: Path, layout: Layout) -> dict[str, Entry]:
    """Create the unfinished file in its full length, with the header; returns the place of each tensor."""
    header = header_bytes(layout)
    entries, place = {}, len(header)
    for name, (dtype, shape) in layout.items():
        entries[name] = Entry(dtype, shape, place)
        place += entries[name].num_bytes
    with unfinished_path(path).open("wb") as stream:
        stream.write(header)
        stream.truncate(place)
    return entries


def publish_unfinished(path: Path) -> None:
    """Give the unfinished file its name, once its bytes are on the disk."""
    sync_file(unfinished_path(path))
    os.replace(unfinished_path(path), path)
    sync_directory(path.parent)


def write_box(path: Path, entry: Entry, box: Box, value: Tensor) -> None:
    """Write a box of a tensor into the unfinished file."""
    if value.numel():
        _mapped(unfinished_path(path), entry, box, "r+").copy_(value)


def read_part(path: Path, entry: Entry, box: Box) -> Tensor:
    """Read a box of a tensor into new memory."""
    if not torch.Size(box.sizes).numel():
        return torch.empty(box.sizes, dtype=entry.dtype)
    return _mapped(path, entry, box, "c").clone()


def _mapped(file: Path, entry: Entry, box: Box, mode: str) -> Tensor:
    mapped = np.memmap(file, np.uint8, mode, entry.start, (entry.num_bytes,))  # type: ignore[call-overload]
    return part_of(torch.from_numpy(mapped).view(entry.dtype).view(entry.shape), box)
