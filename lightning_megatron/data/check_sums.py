"""Check sums of token files, beside them: the pair's format has none, and a flipped bit is another token.

``PREFIX.crc`` is little-endian::

    offset   bytes  what
    0        8      b"LMCRC32\\0"
    8        8      length of .bin in bytes, uint64
    16       4      CRC-32 of .idx, uint32
    20       4      CRC-32 of all that follows, uint32
    24       4 n    CRC-32 of each 64 KiB of .bin, uint32

Our tools write it. Files of other programs have none, and are read without.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.errors import DataError

_MAGIC = b"LMCRC32\0"
_HEADER = struct.Struct("<8sQII")
_BLOCK = 1 << 16
_ANEW = "copy all files of the data again; if another program has rewritten them, remove this file"


def sums_path(prefix: str | Path) -> Path:
    """Path of the check sums of a pair."""
    return Path(f"{prefix}.crc")


class TokenSums:
    """Check sums of the tokens of a pair; each block is compared when it is first read.

    Args:
        prefix: path of the pair without its endings.
        tokens: all tokens.

    Raises:
        DataError: if the sums are damaged, or those of another pair.
    """

    def __init__(self, prefix: str, tokens: NDArray[Any]) -> None:
        self._prefix, self._tokens = prefix, tokens
        raw = sums_path(prefix).read_bytes()
        if raw[:8] != _MAGIC or len(raw) < _HEADER.size:
            raise DataError.at(sums_path(prefix), "no check sums of token files", do=_ANEW)
        _, size, self._index, whole = _HEADER.unpack_from(raw)
        self._sums = np.frombuffer(raw, "<u4", offset=_HEADER.size) if not len(raw) % 4 else np.empty(0, "<u4")
        if zlib.crc32(raw[_HEADER.size :]) != whole or len(self._sums) != -(-size // _BLOCK):
            raise DataError.at(sums_path(prefix), "the check sums are damaged themselves", do=_ANEW)
        if size != tokens.nbytes:
            fault = f"these are the check sums of {size} bytes of tokens, and there are {tokens.nbytes}"
            raise DataError.at(sums_path(prefix), fault, do=_ANEW)
        self._seen = bytearray(len(self._sums))

    def check_index(self, raw: NDArray[np.uint8]) -> None:
        """Compare the bytes of the ``.idx``.

        Raises:
            DataError: if they are not those that the sums were made of.
        """
        if zlib.crc32(raw.data) != self._index:
            raise DataError.at(sums_path(self._prefix), f"the check sum of {self._prefix}.idx differs", do=_ANEW)

    def check(self, start: int, end: int) -> None:
        """Compare the tokens ``[start, end)``, unless that has been done.

        Raises:
            DataError: if any of them is not what was written.
        """
        item, seen = self._tokens.itemsize, self._seen
        first, last = start * item // _BLOCK, -(-end * item // _BLOCK)
        if start == end or seen.find(0, first, last) < 0:
            return
        for block in range(first, last):
            part = self._tokens[block * _BLOCK // item : (block + 1) * _BLOCK // item]
            if not seen[block] and zlib.crc32(part.view(np.uint8).data) != self._sums[block]:
                place = f"bytes {block * _BLOCK} to {min((block + 1) * _BLOCK, self._tokens.nbytes)}"
                fault = f"damaged: {place} are not those that were written, by the check sum in {self._prefix}.crc"
                raise DataError.at(f"{self._prefix}.bin", fault, do="copy it again, or preprocess the corpus again")
            seen[block] = 1


class GrowingSums:
    """Check sums of a ``.bin`` that is being written.

    Args:
        keep: function that is called with the sum of each block, in order.
    """

    def __init__(self, keep: Callable[[list[int]], None]) -> None:
        self._keep, self._size, self._open = keep, 0, 0

    def update(self, data: memoryview) -> None:
        """Add the next bytes of the file."""
        while len(data):
            part = data[: _BLOCK - self._size % _BLOCK]
            self._open, self._size, data = zlib.crc32(part, self._open), self._size + len(part), data[len(part) :]
            if self._size % _BLOCK == 0:
                self._end_block()

    def _end_block(self) -> None:
        self._keep([self._open])
        self._open = 0

    def write(self, file: BinaryIO, index: int, sums: Iterable[NDArray[Any]]) -> None:
        """Write the file of check sums.

        Args:
            file: stream to write to.
            index: check sum of the ``.idx``.
            sums: the sums that ``keep`` was called with.
        """
        if self._size % _BLOCK:
            self._end_block()
        file.write(bytes(_HEADER.size))
        whole = 0
        for part in sums:
            file.write(part.tobytes())
            whole = zlib.crc32(part.data, whole)
        file.seek(0)
        file.write(_HEADER.pack(_MAGIC, self._size, index, whole))
