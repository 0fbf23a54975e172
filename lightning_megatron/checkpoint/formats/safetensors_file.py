"""Tensors in one file at places that are known before any of them is: safetensors' format, written out of order.

The header holds names, dtypes, shapes and places, so that each part of each tensor can be written by whoever holds it,
and the bytes of the file do not depend on who that was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_megatron.checkpoint.directory.atomic_dir import sync_directory, sync_file
from lightning_megatron.checkpoint.formats.hf.directory import SAFETENSORS_DTYPES
from lightning_megatron.checkpoint.formats.hf.write import header_bytes
from lightning_megatron.errors import CheckpointError
from lightning_megatron.params import Box

Known = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class Entry:
    """A tensor of the file.

    Attributes:
        dtype: its dtype.
        shape: its shape.
        start: its first byte, from the beginning of the file.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        """Its length."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def unfinished(path: Path) -> Path:
    """Where ``path`` is written before it is complete."""
    return path.with_name(f".{path.name}.saving")


def begin(path: Path, known: Known) -> dict[str, Entry]:
    """Make the unfinished file in its full length, with the header; returns where each tensor goes."""
    header = header_bytes(dict(known))
    entries, place = {}, len(header)
    for name, (dtype, shape) in known.items():
        entries[name] = Entry(dtype, shape, place)
        place += entries[name].num_bytes
    with unfinished(path).open("wb") as stream:
        stream.write(header)
        stream.truncate(place)
    return entries


def finish(path: Path) -> None:
    """Give the unfinished file its name, once its bytes are on the disk."""
    sync_file(unfinished(path))
    os.replace(unfinished(path), path)
    sync_directory(path.parent)


def read_entries(path: Path) -> dict[str, Entry]:
    """What the header of a file says.

    Raises:
        CheckpointError: if it is no such file, or is truncated.
    """
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
        found = {
            name: Entry(SAFETENSORS_DTYPES[e["dtype"]], tuple(e["shape"]), 8 + length + e["data_offsets"][0])
            for name, e in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, OverflowError, MemoryError) as error:
        raise CheckpointError(f"{path}: missing, truncated or no safetensors file: {error}") from None
    if path.stat().st_size < max((entry.start + entry.num_bytes for entry in found.values()), default=0):
        raise CheckpointError(f"{path}: truncated")
    return found


def write_part(path: Path, entry: Entry, box: Box, value: Tensor) -> None:
    """Write a box of a tensor into the unfinished file."""
    if value.numel():
        _part(unfinished(path), entry, box, "r+").copy_(value)


def read_part(path: Path, entry: Entry, box: Box) -> Tensor:
    """Read a box of a tensor into memory of its own."""
    if not torch.Size(box.sizes).numel():
        return torch.empty(box.sizes, dtype=entry.dtype)
    return _part(path, entry, box, "c").clone()


def _part(file: Path, entry: Entry, box: Box, mode: str) -> Tensor:
    mapped = np.memmap(file, np.uint8, mode, entry.start, (entry.num_bytes,))  # type: ignore[call-overload]
    view = torch.from_numpy(mapped).view(entry.dtype).view(entry.shape)
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        view = view.narrow(dim, offset, size)
    return view
