"""Comparison of the size that a file claims to unpack to with its own length, before memory is allocated for it.

``torch.save`` does not compress, so the contents of its archives take at most the bytes of the file, and the tensors of
a table take at most the bytes of the files that it names. A few kilobytes that claim to be gigabytes are refused.
"""

from __future__ import annotations

import io
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_megatron.checkpoint.integrity.metadata_file import METADATA, Place
from lightning_megatron.errors import CheckpointError


def refuse_packed(file: Path) -> None:
    """Raise for an archive of ``torch.save`` that unpacks to more bytes than the file has.

    Raises:
        CheckpointError: naming the file; also if it is no regular file.
        OSError: if it is not there.
    """
    if not file.is_file():  # before it is opened, which a pipe would wait in
        raise CheckpointError(f"{file}: {'no ordinary file' if file.exists() else 'missing'}")
    with file.open("rb") as stream:
        _refuse_packed(stream, file.stat().st_size, str(file))


def refuse_packed_items(directory: Path, places: Iterable[Place]) -> None:
    """Raise for such an archive inside the files of a checkpoint.

    Raises:
        CheckpointError: naming the file.
        OSError: if a file is not there.
    """
    by_file: dict[str, set[Place]] = defaultdict(set)
    for place in places:
        by_file[place.relative_path].add(place)
    for name, found in by_file.items():
        with (directory / name).open("rb") as stream:
            for place in sorted(found, key=lambda place: place.offset):
                _refuse_packed(FileSlice(stream, place), place.length, str(directory / name))


def refuse_oversized(directory: Path, metadata: Metadata) -> None:
    """Raise if the tensors that ``.metadata`` lists take more bytes than the files that it names.

    Raises:
        CheckpointError: naming ``.metadata``.
    """
    entries = metadata.state_dict_metadata.values()
    tensors = [entry for entry in entries if isinstance(entry, TensorStorageMetadata)]
    wanted = sum(prod(entry.size) * entry.properties.dtype.itemsize for entry in tensors)
    files = {directory / place.relative_path for place in (metadata.storage_data or {}).values()}
    there = sum(file.stat().st_size for file in files if file.is_file())
    if wanted > there:
        raise CheckpointError(
            f"{directory / METADATA}: the tensors in it take {wanted} bytes, and the files that it names have {there}"
        )


def refuse_odd(file: Path, values: Mapping[str, Any]) -> None:
    """Raise for tensors of a file that are not plain (sparse, quantized), or are views larger than the file.

    Raises:
        CheckpointError: naming file and tensor.
    """
    length = file.stat().st_size
    for name, tensor in values.items():
        if not torch.is_tensor(tensor):
            continue
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            raise CheckpointError(f"{file}: {name} is no plain tensor of numbers")
        if tensor.nbytes > length:
            raise CheckpointError(f"{file}: {name} takes {tensor.nbytes} bytes, and the whole file has {length}")


def _refuse_packed(stream: Any, length: int, name: str) -> None:
    try:
        with zipfile.ZipFile(stream) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
    except Exception:  # no archive, or a broken one: the next reader reports it
        return
    if unpacked > length:
        raise CheckpointError(f"{name}: an archive of {length} bytes that unpacks to {unpacked}: not from torch.save")


class FileSlice(io.RawIOBase):
    """A part of a file, read like a file."""

    def __init__(self, stream: IO[bytes], place: Place) -> None:
        self._stream, self._place, self._at = stream, place, 0

    def seekable(self) -> bool:
        """True, always."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a byte of the part."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._place.length}[whence]
        self._at = max(0, start + offset)
        return self._at

    def tell(self) -> int:
        """The current byte of the part."""
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Read bytes, at most to the end of the part."""
        left = max(0, self._place.length - self._at)
        self._stream.seek(self._place.offset + self._at)
        content = self._stream.read(left if size < 0 else min(size, left))
        self._at += len(content)
        return content
