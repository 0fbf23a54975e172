"""Boxes of saved tensors, read straight into the memory that they belong to.

torch's own reader unpacks each saved tensor into new memory and copies the box from there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from lightning_megatron.checkpoint.formats.tensor_archive import ValueFinder, Values
from lightning_megatron.checkpoint.integrity.metadata_file import Place
from lightning_megatron.checkpoint.integrity.unpacked_size import refuse_packed_items
from lightning_megatron.errors import CheckpointError

_THREADS = 4
_TASK_BYTES = 1 << 24  # per task of a thread
_SCRATCH_BYTES = 1 << 18  # of rows that are read together if only parts of them are needed; they fit the CPU cache
_ROW_BYTES = 1 << 10  # minimum length of a row that is read straight to its own place in memory
_VECTORS = 512  # rows per call of ``os.preadv``
_READS_VECTORS = hasattr(os, "preadv")
_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class _Read:
    """A box to read: at ``offsets`` of a whole tensor, whose ``values`` lie in a file, into the memory ``target``."""

    file: Path
    values: Values
    offsets: tuple[int, ...]
    target: Tensor

    @classmethod
    def of(cls, file: Path, values: Values, offsets: tuple[int, ...], target: Tensor) -> _Read:
        """A box of any tensor; a scalar is read as a row of one element."""
        if values.shape:
            return cls(file, values, offsets, target)
        return cls(file, replace(values, shape=(1,)), (0,), target.view(1))

    @property
    def row_bytes(self) -> int:
        """Bytes from one index of the first dimension to the next."""
        return prod(self.values.shape[1:]) * self.values.dtype.itemsize

    @property
    def is_plain_memory(self) -> bool:
        """True if bytes of the file can be put into the target as they are, by any thread."""
        target = self.target
        return target.is_cpu and target.dtype == self.values.dtype and target.element_size() in _NUMBERS

    @property
    def is_one_range_of_the_file(self) -> bool:
        """True if the box is one range of the file, whose bytes can be put into memory as they are."""
        return self.target.shape[1:] == self.values.shape[1:] and self.is_plain_memory

    @property
    def has_long_rows(self) -> bool:
        """True if each row of the target is contiguous and long enough for a read of its own."""
        return self.target[0].is_contiguous() and self.row_bytes >= _ROW_BYTES

    def rows(self, first: int, count: int) -> _Read:
        """The part of the box with ``count`` indices of the first dimension, from the box's index ``first`` on."""
        offsets = (self.offsets[0] + first, *self.offsets[1:])
        return replace(self, offsets=offsets, target=self.target.narrow(0, first, count))

    def row(self, index: int) -> _Read:
        """The part of the box at one index of the first dimension, without that dimension."""
        start = self.values.start + (self.offsets[0] + index) * self.row_bytes
        values = Values(start, self.values.dtype, self.values.shape[1:])
        return _Read.of(self.file, values, self.offsets[1:], self.target[index])

    def parts(self) -> Iterator[_Read]:
        """The box in parts for the threads."""
        count = max(1, _TASK_BYTES // max(1, self.row_bytes))
        total = self.target.shape[0]
        for first in range(0, total, count):
            yield self.rows(first, min(count, total - first))


class BoxReader(FileSystemReader):
    """A reader of torch.distributed.checkpoint's files without a second copy of the tensors."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the memory that the planner names.

        Raises:
            CheckpointError: if a file is truncated, or compressed.
        """
        boxes, others = self._split(plan, planner)
        straight = [box for box in boxes if box.is_plain_memory]
        with ThreadPoolExecutor(_THREADS) as threads:
            for _ in threads.map(_read, _tasks(straight)):
                pass
        for box in straight:
            increment_version(box.target)  # numpy has written it, which autograd and fp8's scales do not see
        for box in boxes:
            if not box.is_plain_memory:  # on a device, or in another dtype: one after the other
                _read([box])
        refuse_packed_items(Path(self.path), (self._place(item) for item in others))
        return super().read_data(replace(plan, items=others), planner)

    def _split(self, plan: LoadPlan, planner: LoadPlanner) -> tuple[list[_Read], list[ReadItem]]:
        """Boxes whose place in a file is known, and all other items."""
        boxes, others = [], []
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._place(item).relative_path, []).append(item)
        for name, items in by_file.items():
            file = Path(self.path) / name
            known: dict[Any, Values | None] = {}
            with file.open("rb") as stream:
                finder = ValueFinder(stream)
                for item in items:
                    if item.type is LoadItemType.TENSOR and item.storage_index not in known:
                        known[item.storage_index] = finder.find(self._place(item))
                    values = known.get(item.storage_index)
                    if values is None or not _is_inside(item, values):
                        others.append(item)
                    else:
                        target = planner.resolve_tensor(item).detach()
                        boxes.append(_Read.of(file, values, tuple(item.storage_offsets), target))
        return boxes, others

    def _place(self, item: ReadItem) -> Place:
        place: Place = self.storage_data[item.storage_index]
        return place


def _is_inside(item: ReadItem, values: Values) -> bool:
    bounds = zip(item.storage_offsets, item.lengths, values.shape, strict=False)
    return len(item.lengths) == len(values.shape) and all(o >= 0 and o + n <= size for o, n, size in bounds)


def _tasks(boxes: Iterable[_Read]) -> Iterator[list[_Read]]:
    """The boxes in parts for the threads, small ones together."""
    task: list[_Read] = []
    size = 0
    for part in (part for box in boxes for part in box.parts()):
        task.append(part)
        size += part.target.nbytes
        if size >= _TASK_BYTES:
            yield task
            task, size = [], 0
    yield task


def _read(parts: Sequence[_Read]) -> None:
    widest = max((part.values.dtype.itemsize for part in parts), default=0)
    scratch = torch.empty(max(_SCRATCH_BYTES, widest), dtype=torch.uint8)
    for file, group in groupby(parts, key=lambda part: part.file):
        with file.open("rb", buffering=0) as stream:
            for part in group:
                if part.target.numel():
                    _fill(stream, part, scratch)


def _fill(stream: Any, box: _Read, scratch: Tensor) -> None:
    count = scratch.numel() // box.row_bytes
    if box.is_one_range_of_the_file and box.target.is_contiguous():
        stream.seek(box.values.start + box.offsets[0] * box.row_bytes)
        _read_into(stream, _bytes_of(box.target), box.file)
    elif box.is_one_range_of_the_file and box.has_long_rows and _READS_VECTORS:
        _read_rows(stream, box)
    elif not count:  # not even one row at a time
        for index in range(box.target.shape[0]):
            _fill(stream, box.row(index), scratch)
    else:
        _read_and_copy(stream, box, scratch, count)


def _read_rows(stream: Any, box: _Read) -> None:
    """Read rows that are not contiguous in memory, many per call of ``os.preadv``."""
    numbers = _NUMBERS[box.target.element_size()]
    rows = box.target.flatten(1) if box.target.ndim > 1 else box.target.unsqueeze(1)
    memory = list(rows.view(numbers).numpy().view("u1"))
    start, length, done = box.values.start + box.offsets[0] * box.row_bytes, len(memory) * box.row_bytes, 0
    while done < length:
        row, begun = divmod(done, box.row_bytes)
        parts = memory[row : row + _VECTORS]
        parts[0] = parts[0][begun:]
        count = os.preadv(stream.fileno(), parts, start + done)
        if not count:
            raise CheckpointError(f"{box.file}: truncated")
        done += count


def _read_and_copy(stream: Any, box: _Read, scratch: Tensor, count: int) -> None:
    """Read whole rows of the file, ``count`` at a time, and copy the needed parts of them."""
    stream.seek(box.values.start + box.offsets[0] * box.row_bytes)
    for first in range(0, box.target.shape[0], count):
        part = box.target[first : first + count]
        content = scratch[: len(part) * box.row_bytes]
        _read_into(stream, _bytes_of(content), box.file)
        rows = content.view(box.values.dtype).view(len(part), *box.values.shape[1:])
        for dim, (offset, size) in enumerate(zip(box.offsets[1:], part.shape[1:], strict=True), 1):
            rows = rows.narrow(dim, offset, size)
        _copy(rows, part, box)


def _copy(rows: Tensor, target: Tensor, box: _Read) -> None:
    if box.is_plain_memory:  # by numpy: torch would start threads of its own for each of our threads
        numbers = _NUMBERS[target.element_size()]
        target.view(numbers).numpy()[...] = rows.view(numbers).numpy()
    else:
        target.copy_(rows)


def _bytes_of(memory: Tensor) -> memoryview:
    return memory.view(_NUMBERS[memory.element_size()]).numpy().data.cast("B")


def _read_into(stream: Any, memory: memoryview, file: Path) -> None:
    done = 0
    while done < len(memory):
        count = stream.readinto(memory[done:])
        if not count:
            raise CheckpointError(f"{file}: truncated")
        done += count
