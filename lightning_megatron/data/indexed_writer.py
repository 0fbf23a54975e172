"""Writer of the ``.bin`` / ``.idx`` pair of :mod:`lightning_megatron.data.indexed`, which writes all or nothing."""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from lightning_megatron.data.check_sums import GrowingSums, sums_path
from lightning_megatron.data.indexed import (
    CODE_OF_DTYPE,
    HEADER,
    MAGIC,
    VERSION,
    IndexedDataset,
    index_path,
    tokens_path,
)
from lightning_megatron.errors import ConfigError, DataError, Problem
from lightning_megatron.files.growing import GrowingFile, sweep
from lightning_megatron.files.writing import writing

_COPY_TOKENS = 1 << 22
_INDEX_BLOCK = 1 << 16
"""Numbers of an index that are held in memory at a time."""


class IndexedDatasetWriter:
    """Writer of one pair and its check sums, for a ``with`` block.

    The files grow under temporary names beside the final ones and get their names in :meth:`finalize`. A block that
    ends with an exception leaves nothing behind; files of a killed process are removed when the prefix is written
    again. Memory does not grow with the number of documents.

    Args:
        prefix: path of the pair without its endings.
        dtype: type of a token, see :func:`~lightning_megatron.data.indexed.optimal_dtype`.

    Raises:
        ConfigError: if the format has no code for ``dtype``.
    """

    def __init__(self, prefix: str | Path, dtype: DTypeLike = np.int32) -> None:
        self.prefix = str(prefix)
        self.dtype: np.dtype[Any] = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in CODE_OF_DTYPE:
            names = tuple(d.name for d in CODE_OF_DTYPE)
            raise ConfigError([Problem("dtype", np.dtype(dtype).name, "an index file has no code for it", names)])
        sweep(index_path(self.prefix))
        sweep(sums_path(self.prefix))
        self._growing = GrowingFile(tokens_path(self.prefix))
        self._lengths = SpooledNumbers(self._growing.path.parent, "<i4")
        self._documents = SpooledNumbers(self._growing.path.parent, "<i8")
        self._documents.extend([0])
        self._blocks = SpooledNumbers(self._growing.path.parent, "<u4")
        self._sums = GrowingSums(self._blocks.extend)
        self._file = self._growing.stream

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finalize()
        else:
            self.abort()

    def add_item(self, tokens: ArrayLike) -> None:
        """Append one sequence to the document that is open.

        Args:
            tokens: ``[n]`` token ids.

        Raises:
            DataError: if a token does not fit the type of the file.
        """
        values = self._fitting(tokens)
        self._append(values)
        self._lengths.extend([values.size])

    def end_document(self) -> None:
        """Close the document: the next sequence belongs to the next one."""
        self._documents.extend([len(self._lengths)])

    def add_document(self, tokens: ArrayLike, lengths: Sequence[int]) -> None:
        """Append a whole document.

        Args:
            tokens: ``[sum(lengths)]`` token ids of all its sequences.
            lengths: tokens of each sequence.

        Raises:
            DataError: if the lengths do not sum to the number of tokens, or a token does not fit.
        """
        values = self._fitting(tokens)
        if sum(lengths) != values.size:
            raise DataError.at(
                self.prefix, f"a document of {values.size} tokens with lengths that sum to {sum(lengths)}"
            )
        self._append(values)
        self._lengths.extend(lengths)
        self.end_document()

    def add_documents(self, tokens: ArrayLike, lengths: ArrayLike, sequences: ArrayLike) -> None:
        """Append several documents at once.

        Args:
            tokens: ``[sum(lengths)]`` token ids.
            lengths: ``[sum(sequences)]`` tokens of each sequence.
            sequences: ``[n]`` number of sequences of each document.

        Raises:
            DataError: if the numbers contradict each other, or a token does not fit.
        """
        values, sizes, counts = self._fitting(tokens), np.asarray(lengths, np.int64), np.asarray(sequences, np.int64)
        if sizes.sum() != values.size or counts.sum() != sizes.size:
            fault = f"{counts.sum()} sequences with {sizes.size} lengths that sum to {sizes.sum()}"
            raise DataError.at(self.prefix, f"{fault}, for {values.size} tokens")
        bounds = len(self._lengths) + np.cumsum(counts)
        self._append(values)
        self._lengths.extend(sizes)
        self._documents.extend(bounds)

    def add_index(self, prefix: str | Path) -> None:
        """Append all documents of another pair.

        Raises:
            DataError: if that pair is faulty or has another token type.
        """
        other = IndexedDataset(prefix)
        if other.dtype != self.dtype:
            fault = f"tokens are {other.dtype.name}, those of {self.prefix} are {self.dtype.name}"
            raise DataError.at(prefix, fault, do="preprocess both with one tokenizer")
        first = len(self._lengths)
        for part in _pieces(other):
            self._append(part)
        for part in blocks(other.sequence_lengths):
            self._lengths.extend(part)
        for part in blocks(other.document_indices[1:]):
            self._documents.extend(first + part)

    def finalize(self) -> None:
        """Write the index and the check sums, and give the files their names. A second call does nothing."""
        if self._file.closed:
            return
        others: list[GrowingFile] = []
        try:
            self._growing.sync()
            index = GrowingFile(index_path(self.prefix))
            others.append(index)
            with writing(index.path):
                check_sum = self._write_index(index.stream)
            sums = GrowingFile(sums_path(self.prefix))
            others.append(sums)
            with writing(sums.path):
                self._sums.write(sums.stream, check_sum, self._blocks)
            index.sync()
            sums.sync()
            # A reader must never see files of an old and of the new pair together. So the old index is removed first,
            # and the new one appears last.
            index_path(self.prefix).unlink(missing_ok=True)
            self._growing.publish()
            sums.publish()
            index.publish()
        finally:
            self.abort()
            for other in others:
                other.discard()

    def abort(self) -> None:
        """Remove files that are not finalized."""
        self._growing.discard()
        self._lengths.close()
        self._documents.close()
        self._blocks.close()

    def _append(self, values: NDArray[Any]) -> None:
        data = values.tobytes()
        with writing(self._growing.path):
            self._file.write(data)
        self._sums.update(memoryview(data))

    def _write_index(self, file: BinaryIO) -> int:
        """Write the index, and return its check sum."""
        check_sum = 0
        for part in self._parts_of_index():
            file.write(part)
            check_sum = zlib.crc32(part, check_sum)
        return check_sum

    def _parts_of_index(self) -> Iterator[bytes]:
        yield HEADER.pack(MAGIC, VERSION, CODE_OF_DTYPE[self.dtype], len(self._lengths), len(self._documents))
        for lengths in self._lengths:
            yield lengths.tobytes()
        start = 0
        for lengths in self._lengths:
            ends = start + np.cumsum(lengths.astype(np.int64) * self.dtype.itemsize)
            yield np.concatenate([[start], ends[:-1]]).astype("<i8").tobytes()
            start = int(ends[-1])
        for documents in self._documents:
            yield documents.tobytes()

    def _fitting(self, tokens: ArrayLike) -> NDArray[Any]:
        values = np.asarray(tokens)
        if values.size and self.dtype.kind in "iu" and values.dtype != self.dtype:
            low, high = int(values.min()), int(values.max())
            limits = np.iinfo(self.dtype)
            if low < limits.min or high > limits.max:
                fault = f"token {low if low < limits.min else high} does not fit {self.dtype.name}"
                raise DataError.at(self.prefix, fault, do="choose the type with optimal_dtype(vocab_size)")
        return values.astype(self.dtype, copy=False).reshape(-1)


class SpooledNumbers:
    """Numbers that are appended and then read in order; full blocks are kept in an unnamed temporary file.

    Args:
        folder: folder of that file.
        dtype: type of a number.
    """

    def __init__(self, folder: Path, dtype: str) -> None:
        self._folder, self._dtype = folder, np.dtype(dtype)
        self._block = np.empty(_INDEX_BLOCK, self._dtype)
        self._filled = self._stored = 0
        self._file: BinaryIO | None = None

    def __len__(self) -> int:
        return self._stored + self._filled

    def extend(self, numbers: ArrayLike) -> None:
        """Append numbers, ``[n]``.

        Raises:
            OverflowError: if one does not fit.
        """
        rest = np.asarray(numbers).reshape(-1)
        if rest.size and rest.max() > np.iinfo(self._dtype).max:
            raise OverflowError(f"{rest.max()} does not fit {self._dtype.name}")
        while rest.size:
            fits = min(rest.size, _INDEX_BLOCK - self._filled)
            self._block[self._filled : self._filled + fits] = rest[:fits]
            self._filled, rest = self._filled + fits, rest[fits:]
            if self._filled == _INDEX_BLOCK:
                self._store()

    def __iter__(self) -> Iterator[NDArray[Any]]:
        """The numbers in blocks, none of them empty."""
        if self._file is not None:
            self._file.seek(0)
            while block := self._file.read(_INDEX_BLOCK * self._dtype.itemsize):
                yield np.frombuffer(block, self._dtype)
        if self._filled:
            yield self._block[: self._filled]

    def close(self) -> None:
        """Remove the file."""
        if self._file is not None:
            self._file.close()

    def _store(self) -> None:
        with writing(self._folder):
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
            self._file.seek(0, os.SEEK_END)
            self._file.write(self._block.tobytes())
        self._stored, self._filled = self._stored + _INDEX_BLOCK, 0


def blocks(numbers: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """A long array, which may be memory-mapped, in parts that fit into memory."""
    for start in range(0, len(numbers), _INDEX_BLOCK):
        yield numbers[start : start + _INDEX_BLOCK]


def _pieces(dataset: IndexedDataset) -> Iterable[NDArray[Any]]:
    """All tokens of a pair, in pieces that fit into memory."""
    count = int(dataset.sequence_lengths.sum(dtype=np.int64))
    for start in range(0, count, _COPY_TOKENS):
        yield dataset.read(start, min(start + _COPY_TOKENS, count))
