"""Archives of ``torch.save`` that hold one tensor, written in one pass over its values and read without extra copies.

``torch.save`` computes the checksum of the values before it writes them, and holds Python's global lock meanwhile. Here
the stream that checksums the file computes it in parallel with the writing. ``torch.load`` first copies the values into
new memory. Here their position in the file is found without unpickling anything, and they are read straight into their
destination.

Only the plain case is handled here, which is what a checkpoint holds: contiguous values, not compressed, in this
machine's byte order. torch writes and reads the others.
"""

from __future__ import annotations

import copy
import pickletools
import struct
import sys
import zipfile
import zlib
from dataclasses import dataclass, replace
from math import prod
from typing import IO, Any, cast

import torch
from torch import Tensor

from lightning_megatron.checkpoint.formats.torch_file import STORAGE_CLASSES, STORAGES, Pickled, TensorSlot
from lightning_megatron.checkpoint.integrity.hashed_files import HashedStream
from lightning_megatron.checkpoint.integrity.metadata_file import Place
from lightning_megatron.checkpoint.integrity.unpacked_size import FileSlice

_LONGEST = 1 << 16  # bytes of a description
_LARGEST = 1 << 31  # bytes of values; more would need another form of archive
_LOCAL, _SUMS = struct.Struct("<4s5H3L2H"), struct.Struct("<4s3L")
_ENTRY, _END = struct.Struct("<4s6H3L5H2L"), struct.Struct("<4s4H2LH")
_VERSION = (20,)
_STORED = (8, 0, 0, 33)  # checksums follow; not compressed; time and date, of 1980


class ArchiveWriter:
    """Writes tensors one after the other into a file so that ``torch.load`` reads each of them."""

    def __init__(self, stream: HashedStream) -> None:
        self._stream = stream
        self._heads: dict[tuple[torch.dtype, tuple[int, ...]], _Archive] = {}

    def write(self, tensor: Tensor) -> None:
        """Write a tensor.

        Args:
            tensor: tensor in host memory, without gradients, whose storage holds its elements alone, row by row.
        """
        if tensor.dtype not in STORAGE_CLASSES or not 0 < tensor.nbytes < _LARGEST:
            torch.save(tensor, cast("IO[bytes]", self._stream))
            return
        kind = tensor.dtype, tuple(tensor.shape)
        if kind not in self._heads:
            self._heads[kind] = _head(tensor)
        archive = self._heads[kind].copy()
        self._stream.write(archive.begin("data/0"))
        values = tensor.view(-1).view(torch.uint8).numpy().data
        archive.end(self._stream.put(values), len(values))
        archive.add("version", b"3\n")
        self._stream.write(archive.finish())


def _head(tensor: Tensor) -> _Archive:
    """The files of an archive before that of the values."""
    archive = _Archive()
    archive.add("data.pkl", Pickled(TensorSlot("", tensor.dtype, tuple(tensor.shape))).pickle)
    archive.add("byteorder", sys.byteorder.encode())
    return archive


class _Archive:
    """A zip archive of uncompressed files, whose checksums follow the content."""

    def __init__(self) -> None:
        self._content, self._directory = b"", b""  # the content since the last call of `begin`
        self._path, self._place, self._length, self._count = b"", 0, 0, 0

    def copy(self) -> _Archive:
        """A copy, to continue from the same beginning."""
        return copy.copy(self)

    def add(self, name: str, content: bytes) -> None:
        """Add a small file."""
        head = self.begin(name)
        self.end(zlib.crc32(content), len(content))
        self._content = head + content + self._content

    def begin(self, name: str) -> bytes:
        """Begin a file, and return all bytes before its content that have not been returned yet."""
        self._path = f"archive/{name}".encode()
        head = _LOCAL.pack(b"PK\3\4", *_VERSION, *_STORED, 0, 0, 0, len(self._path), 0) + self._path
        found, self._content = self._content + head, b""
        self._place = self._length
        self._length += len(head)
        return found

    def end(self, check_sum: int, length: int) -> None:
        """End the file, whose content the caller has written."""
        sums = check_sum, length, length
        self._content = _SUMS.pack(b"PK\7\10", *sums)
        self._length += length + len(self._content)
        entry = *_VERSION, *_VERSION, *_STORED, *sums, len(self._path), 0, 0, 0, 0, 0, self._place
        self._directory += _ENTRY.pack(b"PK\1\2", *entry) + self._path
        self._count += 1

    def finish(self) -> bytes:
        """End the archive, and return the bytes that have not been returned yet."""
        end = _END.pack(b"PK\5\6", 0, 0, self._count, self._count, len(self._directory), self._length, 0)
        return self._content + self._directory + end


@dataclass(frozen=True)
class Values:
    """Position of a tensor's contiguous values in a file; ``start`` counts bytes from its beginning."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class ValueFinder:
    """Finds the values of the archives in a file; many archives begin with the same bytes."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._known: dict[int, list[tuple[bytes, Values]]] = {}

    def find(self, place: Place) -> Values | None:
        """The values of an archive; ``None`` if only ``torch.load`` can tell what it holds."""
        alike = self._known.setdefault(place.length, [])
        for head, values in alike:
            self._stream.seek(place.offset)
            if self._stream.read(len(head)) == head:  # the same pickle, and the values right behind it
                return replace(values, start=place.offset + len(head))
        try:
            with zipfile.ZipFile(FileSlice(self._stream, place)) as archive:
                found = _values(archive, self._stream, place)
            if found is not None and found.start - place.offset <= _LONGEST:
                self._stream.seek(place.offset)
                alike.append((self._stream.read(found.start - place.offset), found))
        except Exception:  # a broken archive or pickle may raise anything, and torch.load reports it
            return None
        return found


def _values(archive: zipfile.ZipFile, stream: IO[bytes], place: Place) -> Values | None:
    entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
    pickled, values, order = entries["data.pkl"], entries["data/0"], entries["byteorder"]
    plain = all(entry.compress_type == zipfile.ZIP_STORED for entry in (pickled, values, order))
    if not plain or pickled.file_size > _LONGEST or order.file_size > _LONGEST:
        return None
    dtype, shape = _description(archive.read(pickled))
    start = place.offset + values.header_offset
    stream.seek(start)
    *_, name, extra = _LOCAL.unpack(stream.read(_LOCAL.size))
    start += _LOCAL.size + name + extra
    length = prod(shape) * dtype.itemsize
    if archive.read(order).decode() != sys.byteorder or values.file_size != length:
        return None
    return Values(start, dtype, shape) if start + length <= place.offset + place.length else None


def _description(pickled: bytes) -> tuple[torch.dtype, tuple[int, ...]]:
    """Dtype and shape of a contiguous tensor; raises for anything else."""
    (function, (storage, offset, shape, strides, *_)) = _calls(pickled)
    _, kind, key, _, count = storage
    expected = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    is_in_order = all(ours == theirs or size < 2 for ours, theirs, size in zip(expected, strides, shape, strict=True))
    is_dense = offset == 0 and count == prod(shape) and is_in_order
    if function != "torch._utils _rebuild_tensor_v2" or key != "0" or not is_dense:
        raise ValueError("not a plain tensor")
    return STORAGES[kind], shape


def _calls(pickled: bytes) -> Any:
    """The object of a pickle, with each call as a pair of the function's name and its arguments.

    Raises:
        ValueError: for an operation that the pickle of a plain tensor does not have.
    """
    stack: list[Any] = []
    marks: list[int] = []
    for operation, value, _ in pickletools.genops(pickled):
        name = operation.name
        if name in ("GLOBAL", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"):
            stack.append(value)
        elif name in ("EMPTY_TUPLE", "NEWFALSE"):
            stack.append(())
        elif name == "MARK":
            marks.append(len(stack))
        elif name in ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"):
            first = marks.pop() if name == "TUPLE" else len(stack) - int(name[-1])
            stack[first:] = [tuple(stack[first:])]
        elif name == "REDUCE":
            stack[-2:] = [(stack[-2], stack[-1])]
        elif name not in ("PROTO", "BINPUT", "BINPERSID", "STOP"):
            raise ValueError(f"{name} in the pickle of a tensor")
    (found,) = stack
    return found
