"""A file of ``torch.save`` whose tensors are written one after the other, so that only one is in memory."""

from __future__ import annotations

import io
import pickle
import sys
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.comm.p2p import as_bytes

STORAGES: dict[str, torch.dtype] = {
    "torch DoubleStorage": torch.float64,
    "torch FloatStorage": torch.float32,
    "torch HalfStorage": torch.float16,
    "torch BFloat16Storage": torch.bfloat16,
    "torch LongStorage": torch.int64,
    "torch IntStorage": torch.int32,
    "torch ShortStorage": torch.int16,
    "torch CharStorage": torch.int8,
    "torch ByteStorage": torch.uint8,
    "torch BoolStorage": torch.bool,
    "torch ComplexFloatStorage": torch.complex64,
    "torch ComplexDoubleStorage": torch.complex128,
}
"""Dtypes by the names of their storages in a pickle; those of other dtypes are named by their bytes."""
STORAGE_CLASSES = {dtype: getattr(torch, name.partition(" ")[2]) for name, dtype in STORAGES.items()}

_ALIGNMENT = 64  # bytes, as in torch's files
_LOCAL_HEADER, _ZIP64_FIELD, _FIELD_HEAD = 30, 20, 4  # bytes of the parts of a zip archive before a file's content


@dataclass(frozen=True, eq=False)
class TensorSlot:
    """A tensor in an object that :class:`TorchFile` writes; its values are written later.

    ``key`` is the name by which the writer knows it.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class _Storage:
    number: int
    slot: TensorSlot

    @property
    def name(self) -> tuple[Any, ...]:
        """The name that ``torch.save`` gives it."""
        if (kind := STORAGE_CLASSES.get(self.slot.dtype)) is None:
            return "storage", torch.UntypedStorage, str(self.number), "cpu", self.slot.nbytes
        return "storage", kind, str(self.number), "cpu", prod(self.slot.shape)


class TorchFile:
    """Writes an object so that ``torch.load`` reads it, with tensors in the place of slots.

    Args:
        content: containers, plain values, tensors and slots; a slot in two places is one tensor.

    Attributes:
        slots: slots, in the order in which :meth:`add` expects their values.
    """

    def __init__(self, path: Path, content: Any) -> None:
        found = Pickled(content)
        self.slots = list(found.numbers)
        self._numbers = iter(found.numbers.values())
        self._archive = zipfile.ZipFile(path, "w")
        self._write("data.pkl", found.pickle)
        self._write("byteorder", sys.byteorder.encode())
        self._write("version", b"3\n")
        for number, value in found.values.items():
            self._write(f"data/{number}", as_bytes(value).numpy().data)

    def add(self, value: Tensor) -> None:
        """Write the values of the next slot."""
        self._write(f"data/{next(self._numbers)}", as_bytes(value).numpy().data)

    def close(self) -> None:
        """End the file."""
        self._archive.close()

    def _write(self, name: str, content: Any) -> None:
        entry, size = zipfile.ZipInfo(f"archive/{name}"), memoryview(content).nbytes
        is_long = size >= zipfile.ZIP64_LIMIT // 2
        head = _LOCAL_HEADER + len(entry.filename) + _FIELD_HEAD + _ZIP64_FIELD * is_long
        assert self._archive.fp is not None
        gap = -(self._archive.fp.tell() + head) % _ALIGNMENT  # torch maps values from a multiple of their size
        entry.extra = b"FB" + gap.to_bytes(2, "little") + bytes(gap)
        with self._archive.open(entry, "w", force_zip64=is_long) as stream:
            stream.write(content)


class Pickled:
    """The pickle of an object, in which storages of tensors have numbers.

    Attributes:
        pickle: the pickle, as ``torch.save`` makes it.
        numbers: number of each slot.
        values: tensors of the object itself, by number.
    """

    def __init__(self, content: Any) -> None:
        self.numbers: dict[TensorSlot, int] = {}
        self.values: dict[int, Tensor] = {}
        outer, stream = self, io.BytesIO()

        class Pickler(pickle.Pickler):
            def reducer_override(self, value: Any) -> Any:
                return outer._reduced(value) if isinstance(value, TensorSlot | Tensor) else NotImplemented

            def persistent_id(self, value: Any) -> Any:
                return value.name if isinstance(value, _Storage) else None

        Pickler(stream, protocol=2).dump(content)
        self.pickle = stream.getvalue()

    def _reduced(self, value: TensorSlot | Tensor) -> Any:
        """The call with which torch rebuilds a tensor, with a number in place of its storage."""
        number = len(self.numbers) + len(self.values)
        if isinstance(value, TensorSlot):
            slot = value
            self.numbers[slot] = number
        else:
            slot = TensorSlot("", value.dtype, tuple(value.shape))
            self.values[number] = value
        function, (_, _, _, _, _, _, *more) = torch.empty(0, dtype=slot.dtype).__reduce_ex__(2)
        strides = tuple(prod(slot.shape[dim + 1 :]) for dim in range(len(slot.shape)))
        return function, (_Storage(number, slot), 0, slot.shape, strides, False, OrderedDict(), *more)
