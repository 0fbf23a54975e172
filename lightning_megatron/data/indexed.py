"""Tokens on disk: the ``.bin`` / ``.idx`` pair that Megatron-LM's tools write and read.

``.bin`` is every token of every sequence, one after the other, without a header. ``.idx`` is little-endian::

    offset        bytes  what
    0             9      b"MMIDIDX\\0\\0"
    9             8      version, uint64 = 1
    17            1      dtype code, uint8
    18            8      S = number of sequences, uint64
    26            8      D = number of documents + 1, uint64
    34            4 S    tokens of each sequence, int32
    34 + 4 S      8 S    byte offset of each sequence in .bin, int64
    34 + 12 S     8 D    document i is the sequences [d[i], d[i + 1]), int64

A sequence is what was added at once (a sentence or a whole document); sequences and documents may be empty.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.check_sums import TokenSums, sums_path
from lightning_megatron.errors import DataError, nearest_names
from lightning_megatron.files.mapped import MappedFiles

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPE_OF_CODE: dict[int, np.dtype[Any]] = {
    1: np.dtype("uint8"),
    2: np.dtype("int8"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}

_UINT16_LIMIT = 65500
"""Vocabularies below this size are stored in 16 bits. Megatron's number, so that files are interchangeable."""

_BLOCK = 1 << 16
"""Sequences that are checked at a time: memory does not grow with their number."""

_PREPROCESS_AGAIN = "preprocess the corpus again, or copy both files again"


def index_path(prefix: str | Path) -> Path:
    """Path of the ``.idx`` of a pair."""
    return Path(f"{prefix}.idx")


def tokens_path(prefix: str | Path) -> Path:
    """Path of the ``.bin`` of a pair."""
    return Path(f"{prefix}.bin")


def optimal_dtype(vocab_size: int | None) -> np.dtype[Any]:
    """Smallest token type that Megatron chooses: uint16 below 65500 tokens, else int32 (also if unknown)."""
    return np.dtype("<u2") if vocab_size is not None and vocab_size < _UINT16_LIMIT else np.dtype("<i4")


class IndexedDataset:
    """The sequences of one ``.bin`` / ``.idx`` pair, read through a memory map.

    The index is checked when the pair is opened, and tokens when they are first read, if there are check sums: our
    tools write them. A pickle (for workers of a loader) contains only the prefix; the other process opens its own map.

    Args:
        prefix: path of the pair without ``.bin`` and ``.idx``.

    Raises:
        DataError: if a half is missing or the two files contradict the format or each other.
    """

    def __init__(self, prefix: str | Path) -> None:
        self._open(str(prefix), check=True)

    @property
    def prefix(self) -> str:
        """Path of the pair without its endings."""
        return self._prefix

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of a token."""
        return self._dtype

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """Tokens of each sequence, ``[S]``."""
        return self._lengths

    @property
    def document_indices(self) -> NDArray[np.int64]:
        """Document ``i`` is the sequences ``[d[i], d[i + 1])``; ``[documents + 1]``."""
        return self._documents

    @property
    def tokens(self) -> NDArray[Any]:
        """The whole ``.bin`` as one read-only map, not compared with check sums."""
        return self._tokens

    def __len__(self) -> int:
        return len(self._lengths)

    @overload
    def __getitem__(self, item: int) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, item: slice) -> list[NDArray[Any]]: ...
    def __getitem__(self, item: int | slice) -> NDArray[Any] | list[NDArray[Any]]:
        """One sequence, or a list of neighbouring ones; read-only views of the map.

        Raises:
            IndexError: if there is no such sequence, or the slice has a step.
        """
        if not isinstance(item, slice):
            return self.get(item)
        start, stop, step = item.indices(len(self))
        if step != 1:
            raise IndexError(f"{self.prefix}: a slice with a step of {step} is not supported")
        return [self.get(i) for i in range(start, stop)]

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Read a part of one sequence.

        Args:
            index: number of the sequence; negative numbers count from the end.
            offset: first token.
            length: number of tokens; ``None`` means up to the end.

        Returns:
            Read-only view ``[length]`` of the map.

        Raises:
            IndexError: if the sequence, or that part of it, does not exist.
            DataError: if the files have been truncated meanwhile, or are not what was written.
        """
        self._mapped.check()
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"{self.prefix} has {len(self)} sequences, there is no number {index}")
        size = int(self._lengths[position])
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            raise IndexError(
                f"{self.prefix}: sequence {index} has {size} tokens, there are no {length} from token {offset} on"
            )
        start = int(self._offsets[position]) // self._dtype.itemsize + offset
        return self.read(start, start + length)

    def read(self, start: int, end: int) -> NDArray[Any]:
        """Tokens ``[start, end)`` of the whole ``.bin``; a read-only view of the map.

        Raises:
            DataError: if the pair has check sums, and the tokens are not those that were written.
        """
        if self._sums is not None:
            self._sums.check(start, end)
        return self._tokens[start:end]

    def __getstate__(self) -> str:
        return self._prefix

    def __setstate__(self, prefix: str) -> None:
        self._open(prefix, check=False)

    def _open(self, prefix: str, *, check: bool) -> None:
        self._prefix = prefix
        idx, binary = index_path(prefix), tokens_path(prefix)
        _require_both(idx, binary)
        self._mapped = MappedFiles((idx, binary))
        raw = np.memmap(idx, dtype=np.uint8, mode="r") if idx.stat().st_size else np.empty(0, np.uint8)
        self._dtype, sequences, documents = _read_header(idx, raw)
        at = HEADER.size
        self._lengths = raw[at : at + 4 * sequences].view("<i4")
        self._offsets = raw[at + 4 * sequences : at + 12 * sequences].view("<i8")
        self._documents = raw[at + 12 * sequences : at + 12 * sequences + 8 * documents].view("<i8")
        size = binary.stat().st_size
        if check:
            _check_index(idx, self._lengths, self._offsets, self._documents, self._dtype.itemsize)
            _check_tokens(idx, binary, size, self._lengths, self._offsets, self._dtype.itemsize)
        count = size // self._dtype.itemsize
        # An empty file cannot be mapped.
        self._tokens = np.memmap(binary, self._dtype, "r", shape=(count,)) if count else np.empty(0, self._dtype)
        self._sums = TokenSums(prefix, self._tokens) if sums_path(prefix).exists() else None
        if check and self._sums is not None:
            self._sums.check_index(raw)


def _require_both(idx: Path, binary: Path) -> None:
    missing = [str(path) for path in (idx, binary) if not path.is_file()]
    if not missing:
        return
    names, stem = sorted(other.stem for other in idx.parent.glob("*.idx")), idx.stem
    beside = [name for name in names if name.startswith(stem)] or nearest_names(stem, names)
    do = "give the path without .bin and .idx" + (f"; beside it: {', '.join(beside[:3])}" if names else "")
    if len(missing) == 1:
        do = f"a dataset is both {idx} and {binary}: copy the missing half, or preprocess the corpus again"
    raise DataError.at(idx.with_suffix(""), f"{' and '.join(missing)} not found", do=do)


def _read_header(idx: Path, raw: NDArray[np.uint8]) -> tuple[np.dtype[Any], int, int]:
    """Read token type, number of sequences and length of the document array, and check the size of the file."""
    if raw[: len(MAGIC)].tobytes() != MAGIC[: len(raw)] or not len(raw):
        raise DataError.at(idx, f"not an index file, it starts with {raw[:9].tobytes()!r} instead of {MAGIC!r}")
    if len(raw) < HEADER.size:
        raise DataError.at(idx, f"truncated: {len(raw)} bytes, the header alone is {HEADER.size}", do=_PREPROCESS_AGAIN)
    _, version, code, sequences, documents = HEADER.unpack(raw[: HEADER.size].tobytes())
    if version != VERSION:
        raise DataError.at(
            idx, f"index version {version}, only version {VERSION} is known", do="preprocess the corpus again"
        )
    if code not in DTYPE_OF_CODE:
        known = ", ".join(f"{c} {d.name}" for c, d in DTYPE_OF_CODE.items())
        raise DataError.at(idx, f"unknown dtype code {code} (known: {known})", do=_PREPROCESS_AGAIN)
    expected = HEADER.size + 12 * sequences + 8 * documents
    if len(raw) < expected:
        fault = f"truncated: {len(raw)} bytes, {sequences} sequences and {documents} document bounds take {expected}"
        raise DataError.at(idx, fault, do=_PREPROCESS_AGAIN)
    if sequences and len(raw) == expected + sequences:
        raise DataError.at(idx, f"a multimodal index ({sequences} mode bytes at the end)", do="only text can be read")
    if len(raw) > expected:
        raise DataError.at(idx, f"{len(raw) - expected} bytes too many", do=_PREPROCESS_AGAIN)
    return DTYPE_OF_CODE[code], sequences, documents


def _check_index(
    idx: Path, lengths: NDArray[np.int32], offsets: NDArray[np.int64], documents: NDArray[np.int64], itemsize: int
) -> None:
    if len(lengths) and int(lengths.min()) < 0:
        worst = int(np.argmax(lengths < 0))
        raise DataError.at(idx, f"sequence {worst} has the negative length {lengths[worst]}", do=_PREPROCESS_AGAIN)
    if not len(documents) or documents[0] != 0 or (np.diff(documents) < 0).any():
        raise DataError.at(idx, "the document bounds do not rise from 0", do=_PREPROCESS_AGAIN)
    if documents[-1] != len(lengths):
        fault = f"{len(lengths)} sequences, but the last document ends at sequence {documents[-1]}"
        raise DataError.at(idx, fault, do=_PREPROCESS_AGAIN)
    if len(offsets) and (int(offsets.min()) < 0 or (offsets % itemsize).any()):
        raise DataError.at(idx, "a sequence starts at an impossible byte", do=_PREPROCESS_AGAIN)


def _check_tokens(
    idx: Path, binary: Path, size: int, lengths: NDArray[np.int32], offsets: NDArray[np.int64], itemsize: int
) -> None:
    """Raise unless ``.bin`` is the sequences in order, without gaps, as every known writer leaves it.

    A single damaged length or offset would otherwise be read as other tokens.
    """
    needed = 0
    for start in range(0, len(lengths), _BLOCK):
        part = slice(start, start + _BLOCK)
        ends = needed + np.cumsum(lengths[part].astype(np.int64) * itemsize)
        begins = np.concatenate([[needed], ends[:-1]])
        if not np.array_equal(begins, offsets[part]):
            worst = start + int(np.argmax(begins != offsets[part]))
            fault = (
                f"sequence {worst} starts at byte {offsets[worst]}, and those before it end at {begins[worst - start]}"
            )
            raise DataError.at(idx, fault, do=_PREPROCESS_AGAIN)
        needed = int(ends[-1])
    if size != needed:
        fault = f"{size} bytes, but its index says {needed} ({needed // itemsize} tokens)"
        raise DataError.at(binary, fault, do=_PREPROCESS_AGAIN)
