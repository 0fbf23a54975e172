"""Cache of arrays that are built once and then mapped by every process of a node.

No process group is needed: the content depends only on its description, and each file is renamed into place once it is
on disk. So any number of processes may build at the same time, on several machines too: an existing file with the same
content is kept, because others may have mapped it, and over NFS they would lose a file that is replaced. Later
processes compare length and CRC-32 of every file with those that were written, and rebuild damaged arrays.
"""

from __future__ import annotations

import hashlib
import json
import logging
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.errors import DataError
from lightning_megatron.files.growing import written_at_once
from lightning_megatron.files.mapped import MappedFiles
from lightning_megatron.files.small import read_json

Arrays = dict[str, NDArray[Any]]

_log = logging.getLogger(__name__)
_BLOCK = 1 << 22  # bytes read at a time


def default_cache_dir(prefix: str | Path) -> Path:
    """Default directory of the indices of a pair: beside the pair."""
    return Path(prefix).parent / "cache" / "GPTDataset_indices"


def cached_arrays(
    cache_dir: str | Path | None,
    fallback_dir: Path,
    kind: str,
    names: tuple[str, ...],
    description: Mapping[str, object],
    build: Callable[[], Arrays],
) -> Arrays:
    """Map the arrays of a description; build them first if they are not stored.

    Args:
        cache_dir: directory that the user gave, or ``None``.
        fallback_dir: directory to use otherwise. If it is read-only the arrays stay in memory, with a warning.
        kind: kind of the arrays, the readable part of the file names.
        names: names of the arrays.
        description: everything that the arrays depend on; its hash is the other part of the file names.
        build: function that computes the arrays.

    Raises:
        DataError: if ``cache_dir`` was named and cannot be written.
    """
    directory = fallback_dir if cache_dir is None else Path(cache_dir)
    text = json.dumps({"format": 2, **description}, indent=4, sort_keys=True)
    stem = f"{hashlib.sha256(text.encode()).hexdigest()[:32]}-{kind}"
    paths = {name: directory / f"{stem}-{name}.npy" for name in names}
    marker = directory / f"{stem}-description.txt"
    found = _load(marker, paths)
    if found is not None:
        return found
    arrays = build()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, path in paths.items():
            with written_at_once(path, keep_equal=True) as stream:
                _save(arrays[name], stream)
        content = json.dumps(
            {**json.loads(text), "files": {path.name: _sums(path) for path in paths.values()}}, indent=4
        )
        # Last, since it says that all other files are complete.
        with written_at_once(marker, keep_equal=True) as stream:
            stream.write(content.encode())
    except OSError as error:
        if cache_dir is not None:
            fault = f"the index cache cannot be written ({error.strerror or error})"
            raise DataError.at(directory, fault, do="name a writable cache_dir") from error
        _log.warning(
            "%s cannot be written (%s): every process builds and holds the %s indices itself; "
            "name a writable cache_dir to build them once",
            directory,
            error.strerror or error,
            kind,
        )
        return arrays
    return _load(marker, paths) or arrays


def mapped_files(arrays: Iterable[NDArray[Any]]) -> MappedFiles:
    """Files of those arrays that are memory-mapped."""
    return MappedFiles(path for array in arrays if isinstance(path := picklable(array), Path))


def picklable(array: NDArray[Any]) -> NDArray[Any] | Path:
    """Replace a memory-mapped ``.npy`` by its path for pickling; :func:`unpickled` opens it again."""
    filename = getattr(array, "filename", None)
    return array if filename is None else Path(filename)


def unpickled(array: NDArray[Any] | Path) -> NDArray[Any]:
    """Restore the array that :func:`picklable` was given."""
    return np.lib.format.open_memmap(array, mode="r") if isinstance(array, Path) else array


def _load(marker: Path, paths: Mapping[str, Path]) -> Arrays | None:
    if not marker.is_file():
        return None
    try:
        written = read_json(marker)["files"]
        for path in paths.values():
            if _sums(path) != written[path.name]:
                raise ValueError(f"{path.name} differs from what was written")
        return {name: np.lib.format.open_memmap(path, mode="r") for name, path in paths.items()}
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        _log.warning("%s is damaged (%s) and is built again", marker.parent, error)
        return None


def _sums(path: Path) -> list[int]:
    """Length and CRC-32 of a file."""
    if not path.is_file():
        raise ValueError(f"{path.name} is no ordinary file")
    length = crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            length, crc = length + len(block), zlib.crc32(block, crc)
    return [length, crc]


def _save(array: NDArray[Any], file: Any) -> None:
    """Write an array as ``np.save`` does, but with the system's error if the file cannot be written whole."""
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
    file.write(np.ascontiguousarray(array).data)
