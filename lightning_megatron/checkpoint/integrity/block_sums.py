"""CRC-32 of files by blocks; each byte is processed once, even if parts of the file need checksums of their own."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, repeat
from pathlib import Path
from typing import NamedTuple

BLOCK = 1 << 20
"""Bytes of a file per check sum."""

_POLYNOMIAL = 0xEDB88320  # of CRC-32
_STRIDE = 1 << 16  # bytes; a checksum is shifted by multiples of it, and by a rest
_SHORT = 1 << 14  # bytes; processing so few twice is faster than combining two checksums
_ZEROS = memoryview(bytes(_STRIDE))
_READ_BYTES = 1 << 25  # per task of a thread
_THREADS = 4


class FileRange(NamedTuple):
    """A range of a file that begins with a block and ends with a block or with the file."""

    file: Path
    start: int
    end: int


def check_sums(ranges: Sequence[FileRange]) -> bytes:
    """The CRC-32s of all blocks of the ranges in their order, four bytes each.

    Raises:
        OSError: for a file that cannot be read.
    """
    reads = [
        FileRange(file, at, min(at + _READ_BYTES, end))
        for file, start, end in ranges
        for at in range(start, end, _READ_BYTES)
    ]
    with ThreadPoolExecutor(_THREADS) as threads:
        return b"".join(threads.map(_sums_of, reads))


def _sums_of(span: FileRange) -> bytes:
    found, buffer = bytearray(), memoryview(bytearray(min(BLOCK, span.end - span.start)))
    with span.file.open("rb", buffering=0) as stream:
        stream.seek(span.start)
        for start in range(span.start, span.end, BLOCK):
            block = buffer[: span.end - start]
            done = 0
            while done < len(block) and (count := stream.readinto(block[done:])):
                done += count
            found += zlib.crc32(block[:done]).to_bytes(4, "big") if done else b""
    return bytes(found)


class BlockSums:
    """The checksums of a file that is written piece by piece, with ``length`` bytes so far."""

    def __init__(self) -> None:
        self.length = 0
        self._whole = bytearray()  # of the blocks that are complete
        self._last = 0

    def add(self, data: memoryview) -> int:
        """Add the next bytes of the file, and return their own CRC-32. Other Python threads run meanwhile."""
        start, own = 0, 0
        while start < len(data):
            before = self.length % BLOCK
            piece = data[start : start + BLOCK - before]
            found = zlib.crc32(piece)
            self._last = _joined(self._last, found, piece) if before else found
            own = _joined(own, found, piece) if start else found
            start += len(piece)
            self.length += len(piece)
            if self.length % BLOCK == 0:
                self._whole += self._last.to_bytes(4, "big")
                self._last = 0
        return own

    def sums(self) -> bytes:
        """The check sums of all blocks, four bytes each; the last one may be shorter than the others."""
        return bytes(self._whole) + (self._last.to_bytes(4, "big") if self.length % BLOCK else b"")


def _joined(before: int, own: int, piece: memoryview) -> int:
    """Combine the checksum of some bytes with that of the piece that follows them."""
    length = len(piece)
    if length < _SHORT:
        return zlib.crc32(piece, before)
    if strides := length // _STRIDE:
        before = _product(before, _PAST[strides])
    if rest := length % _STRIDE:
        zeros = _ZEROS[:rest]
        before = zlib.crc32(zeros, before) ^ zlib.crc32(zeros)
    return before ^ own


def _product(a: int, b: int) -> int:
    """Product of two polynomials modulo that of CRC-32, whose bits run from the highest power to the lowest."""
    found = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            found ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return found


def _past(num_bytes: int) -> int:
    """Factor that shifts a checksum past ``num_bytes`` further bytes, a power of two."""
    factor = 1 << 23  # x to the 8
    while num_bytes > 1:
        factor = _product(factor, factor)
        num_bytes //= 2
    return factor


_PAST = (1 << 31, *accumulate(repeat(_past(_STRIDE), BLOCK // _STRIDE), _product))
"""Factors for 0 strides up to a whole block."""
