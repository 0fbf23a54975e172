"""Writer of the ``.bin`` / ``.idx`` pair of :mod:`lightning_megatron.data.indexed`, which writes all or nothing."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

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


class IndexedDatasetWriter:
    """Writer of one pair, for a ``with`` block.

    The files grow under temporary names beside the final ones and get their names in :meth:`finalize`. A block that
    ends with an exception leaves nothing behind; files of a killed process are removed when the prefix is written
    again.

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
        self._lengths = array("i")
        self._documents = array("q", [0])
        sweep(index_path(self.prefix))
        self._growing = GrowingFile(tokens_path(self.prefix))
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
        self._lengths.append(values.size)

    def end_document(self) -> None:
        """Close the document: the next sequence belongs to the next one."""
        self._documents.append(len(self._lengths))

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
        self._lengths.frombytes(other.sequence_lengths.tobytes())
        self._documents.frombytes((first + other.document_indices[1:]).tobytes())

    def finalize(self) -> None:
        """Write the index and give both files their names. A second call does nothing."""
        if self._file.closed:
            return
        index = None
        try:
            self._growing.sync()
            index = GrowingFile(index_path(self.prefix))
            with writing(index.path):
                self._write_index(index.stream)
            index.sync()
            # A reader must never see one half of this pair beside the other half of an older one. So the old index
            # goes first, and the new one comes last.
            index_path(self.prefix).unlink(missing_ok=True)
            self._growing.publish()
            index.publish()
        finally:
            self.abort()
            if index is not None:
                index.discard()

    def abort(self) -> None:
        """Remove files that are not finalized."""
        self._growing.discard()

    def _append(self, values: NDArray[Any]) -> None:
        with writing(self._growing.path):
            self._file.write(values.tobytes())

    def _write_index(self, file: BinaryIO) -> None:
        lengths = np.frombuffer(self._lengths, np.int32) if self._lengths else np.empty(0, np.int32)
        sizes = lengths.astype(np.int64) * self.dtype.itemsize
        documents = np.frombuffer(self._documents, np.int64)
        file.write(HEADER.pack(MAGIC, VERSION, CODE_OF_DTYPE[self.dtype], len(lengths), len(documents)))
        file.write(lengths.astype("<i4").tobytes())
        file.write((np.cumsum(sizes) - sizes).astype("<i8").tobytes())
        file.write(documents.astype("<i8").tobytes())

    def _fitting(self, tokens: ArrayLike) -> NDArray[Any]:
        values = np.asarray(tokens)
        if values.size and self.dtype.kind in "iu" and values.dtype != self.dtype:
            low, high = int(values.min()), int(values.max())
            limits = np.iinfo(self.dtype)
            if low < limits.min or high > limits.max:
                fault = f"token {low if low < limits.min else high} does not fit {self.dtype.name}"
                raise DataError.at(self.prefix, fault, do="choose the type with optimal_dtype(vocab_size)")
        return values.astype(self.dtype, copy=False).reshape(-1)


def _pieces(dataset: IndexedDataset) -> Iterable[NDArray[Any]]:
    """All tokens of a pair in the order of its sequences, in pieces that fit into memory."""
    if not dataset.is_contiguous:
        yield from (dataset[i] for i in range(len(dataset)))
        return
    count = int(dataset.sequence_lengths.sum(dtype=np.int64))
    for start in range(0, count, _COPY_TOKENS):
        yield dataset.tokens[start : min(start + _COPY_TOKENS, count)]
