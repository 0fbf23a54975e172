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
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO, cast

from lightning_megatron.data.tokenizers import require
from lightning_megatron.errors import DataError

_HALF = re.compile("[\ud800-\udfff]")  # JSON may escape one half of a pair, which no text can hold

LONGEST_LINE = 1 << 26
"""Bytes of a line, unless the user says otherwise: a document of some ten million words."""


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


def read_lines(path: Path, longest: int = LONGEST_LINE) -> Iterator[tuple[int, bytes]]:
    """Numbered lines (from 1) of a plain, ``.gz``, ``.xz``, ``.bz2`` or ``.zst`` file; blank lines are left out.

    Args:
        path: the file.
        longest: bytes of a line at most, decompressed.

    Raises:
        DataError: if the file cannot be read or decompressed, which for ``.zst`` takes the package ``zstandard``, or a
            line is longer.
    """
    number = 0
    try:
        with closing(_opener(path)(path)) as file:
            while line := file.readline(longest + 1):
                number += 1
                if len(line) > longest:
                    fault = f"longer than {longest} bytes"
                    do = "give one document a line, or raise the limit with --longest-line if the line is meant"
                    raise DataError.at(path, fault, line=number, do=do)
                if line.strip():
                    yield number, line
    except _decompression_errors(path) as error:
        raise _not_decompressed(path, number, error) from error
    except OSError as error:
        if error.errno is None:  # bz2's own, which have no number
            raise _not_decompressed(path, number, error) from error
        raise DataError.at(path, f"cannot be read ({error})") from error


def _not_decompressed(path: Path, number: int, error: Exception) -> DataError:
    return DataError.at(path, f"cannot be decompressed after line {number} ({error})", do="fetch the file again")


def text_of(path: str | Path, number: int, line: bytes, keys: Sequence[str]) -> dict[str, str]:
    """Read the values of some keys from one line of JSON.

    Raises:
        DataError: naming file and line, if it is not JSON, not an object, or a key is missing or not text.
    """
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are the former
        fault = f"not JSON ({error})"
        raise DataError.at(path, fault, line=number, do="every line must be one JSON object") from None
    if not isinstance(record, dict):
        fault = f"a JSON {type(record).__name__}, not an object"
        raise DataError.at(path, fault, line=number, do='write one object a line, like {"text": "..."}')
    for key in keys:
        if key not in record:
            fault = f"has no key {key!r}, only {', '.join(map(repr, record)) or 'none'}"
            raise DataError.at(path, fault, line=number, do="name the key of the text with --json-keys")
        if not isinstance(record[key], str):
            fault = f"the value of {key!r} is {type(record[key]).__name__}, not text"
            raise DataError.at(path, fault, line=number, do="repair or remove the line")
        if not record[key].isascii() and (half := _HALF.search(record[key])):
            fault = f"the value of {key!r} holds half a character ({half[0]!a})"
            raise DataError.at(path, fault, line=number, do="repair or remove the line")
    return {key: record[key] for key in keys}


def _decompression_errors(path: Path) -> tuple[type[Exception], ...]:
    errors: tuple[type[Exception], ...] = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)
    return (*errors, _zstandard(path).ZstdError) if path.suffix == ".zst" else errors


def _opener(path: Path) -> Callable[[Path], BinaryIO]:
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
    if path.suffix == ".zst":
        zstandard = _zstandard(path)
        return lambda file: cast(BinaryIO, io.BufferedReader(zstandard.open(file, "rb")))  # its own has no lines
    return openers.get(path.suffix, lambda file: open(file, "rb"))


def _zstandard(path: Path) -> Any:
    try:
        return require("zstandard", extra="data")
    except ModuleNotFoundError as error:
        raise DataError.at(path, f"cannot be decompressed: {error}") from None
