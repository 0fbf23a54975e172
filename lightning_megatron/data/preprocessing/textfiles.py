"""Reader of lines and JSON documents from text files, compressed or not.

A few bytes of a compressed file may decompress to gigabytes, so a line is read up to a limit only.
"""

from __future__ import annotations

import bz2
import glob
import gzip
import io
import json
import lzma
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from lightning_megatron.data.tokenizers import require
from lightning_megatron.errors import DataError

_HALF = re.compile("[\ud800-\udfff]")  # JSON may escape one half of a pair, which no text can hold

LONGEST_LINE = 1 << 26
"""Default limit for a line in bytes: a document of some ten million words."""

_BLOCK = 1 << 22
_ZST_GIVEN = 1 << 11  # bytes, which may become 32768 times as many
_ZST_BUFFER = 1 << 16
_OPENERS: Mapping[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}


def expand(inputs: Sequence[str | Path]) -> list[Path]:
    """Files that paths and patterns name: matches in alphabetical order, arguments in the order given.

    Raises:
        DataError: if a path does not exist or a pattern matches nothing.
    """
    files: list[Path] = []
    for item in inputs:
        if Path(item).is_file():
            files.append(Path(item))
            continue
        matches = sorted(Path(name) for name in glob.glob(str(item), recursive=True) if Path(name).is_file())
        if not matches:
            fault = "no file matches" if glob.has_magic(str(item)) else "no such file"
            raise DataError.at(item, fault, do="check --input")
        files += matches
    return files


@dataclass(frozen=True)
class Source:
    """A file of lines, or the whole lines in a range of its bytes.

    Attributes:
        path: the file.
        start: byte at which a line begins; above 0 only in files that are not compressed.
        stop: byte at which another line begins; ``None`` is the end of the file.
    """

    path: Path
    start: int = 0
    stop: int | None = None

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        return (self.path.stat().st_size if self.stop is None else self.stop) - self.start

    def at(self, number: int, fault: str, do: str = "") -> DataError:
        """The error at a line.

        Args:
            number: number of the line in this range, from 1.
            fault: the fault.
            do: remedy.
        """
        return DataError.at(self.path, fault, line=number + self._lines_before(), do=do)

    def _lines_before(self) -> int:
        left, count = self.start, 0
        with self.path.open("rb") as file:
            while left and (block := file.read(min(left, _BLOCK))):
                left, count = left - len(block), count + block.count(b"\n")
        return count


class LineReader:
    """Reader of the numbered lines (from 1) of a source; blank lines are left out.

    Args:
        source: plain, ``.gz``, ``.xz``, ``.bz2`` or ``.zst`` file.
        longest: bytes of a line at most, decompressed.
    """

    def __init__(self, source: Source, longest: int = LONGEST_LINE) -> None:
        self._source, self._longest = source, longest
        self._raw: BinaryIO | None = None
        self._read = 0

    @property
    def consumed(self) -> int:
        """Bytes of the source that are read, as it is stored."""
        if self._raw is not None and not self._raw.closed:
            self._read = self._raw.tell() - self._source.start
        return self._read

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Read the lines.

        Raises:
            DataError: if the file cannot be read or decompressed, which for ``.zst`` takes the package ``zstandard``,
                or a line is longer.
        """
        path, number = self._source.path, 0
        try:
            with path.open("rb") as raw, closing(_opened(path, raw)) as file:
                self._raw = raw
                raw.seek(self._source.start)
                left = math.inf if self._source.stop is None else self._source.stop - self._source.start
                while left > 0 and (line := file.readline(self._longest + 1)):
                    number, left = number + 1, left - len(line)
                    if len(line) > self._longest:
                        do = "give one document a line, or raise the limit with --longest-line if the line is right"
                        raise self._source.at(number, f"longer than {self._longest} bytes", do)
                    if not line.isspace():
                        yield number, line
                self._read = self.consumed
        except _decompression_errors(path) as error:
            raise _not_decompressed(path, number, error) from error
        except OSError as error:
            if error.errno is None:  # bz2's own, which have no number
                raise _not_decompressed(path, number, error) from error
            raise DataError.at(path, f"cannot be read ({error})") from error


def read_lines(path: Path, longest: int = LONGEST_LINE) -> Iterator[tuple[int, bytes]]:
    """The lines of a whole file, see :class:`LineReader`."""
    return iter(LineReader(Source(path), longest))


def _not_decompressed(path: Path, number: int, error: Exception) -> DataError:
    return DataError.at(path, f"cannot be decompressed after line {number} ({error})", do="fetch the file again")


class BrokenLineError(ValueError):
    """A line that is no document.

    Attributes:
        fault: the fault.
        do: remedy.
    """

    def __init__(self, fault: str, do: str) -> None:
        super().__init__(fault, do)
        self.fault, self.do = fault, do


def text_of(line: bytes, keys: Sequence[str]) -> dict[str, str]:
    """Read the values of some keys from one line of JSON.

    Raises:
        BrokenLineError: if it is not JSON, not an object, or a key is missing or not text.
    """
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are the former
        raise BrokenLineError(f"not JSON ({error})", "every line must be one JSON object") from None
    if not isinstance(record, dict):
        fault = f"a JSON {type(record).__name__}, not an object"
        raise BrokenLineError(fault, 'write one object a line, like {"text": "..."}')
    for key in keys:
        if key not in record:
            fault = f"has no key {key!r}, only {', '.join(map(repr, record)) or 'none'}"
            raise BrokenLineError(fault, "name the key of the text with --json-keys")
        if not isinstance(record[key], str):
            fault = f"the value of {key!r} is {type(record[key]).__name__}, not text"
            raise BrokenLineError(fault, "repair or remove the line")
        if not record[key].isascii() and (half := _HALF.search(record[key])):
            fault = f"the value of {key!r} holds half a character ({half[0]!a})"
            raise BrokenLineError(fault, "repair or remove the line")
    return {key: record[key] for key in keys}


def _decompression_errors(path: Path) -> tuple[type[Exception], ...]:
    errors: tuple[type[Exception], ...] = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)
    return (*errors, _zstandard(path).ZstdError) if path.suffix == ".zst" else errors


def is_compressed(path: Path) -> bool:
    """True if a file can be read from its beginning only."""
    return path.suffix in (*_OPENERS, ".zst")


def _opened(path: Path, raw: BinaryIO) -> BinaryIO:
    if path.suffix == ".zst":
        return cast(BinaryIO, io.BufferedReader(_ZstandardStream(_zstandard(path), raw), _ZST_BUFFER))
    return cast(BinaryIO, _OPENERS[path.suffix](raw)) if path.suffix in _OPENERS else raw


class _ZstandardStream(io.RawIOBase):
    """Decompressed bytes of a file of one or more frames.

    The package's own reader reports no error for a file that is truncated within a frame.
    """

    def __init__(self, zstandard: Any, raw: BinaryIO) -> None:
        self._zstandard, self._raw = zstandard, raw
        self._frame: Any = None
        self._given, self._ready = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and self._decompress():
            pass
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _decompress(self) -> bool:
        """Decompress some more; False at the end of the file."""
        given = self._given or self._raw.read(_ZST_GIVEN)
        if not given:
            if self._frame is not None:
                raise EOFError("the file ends in the middle of a frame")
            return False
        if self._frame is None:
            self._frame = self._zstandard.ZstdDecompressor().decompressobj()
        self._ready, self._given = memoryview(self._frame.decompress(given)), b""
        if self._frame.eof:
            self._frame, self._given = None, self._frame.unused_data
        return True


def _zstandard(path: Path) -> Any:
    try:
        return require("zstandard", extra="data")
    except ModuleNotFoundError as error:
        raise DataError.at(path, f"cannot be decompressed: {error}") from None
