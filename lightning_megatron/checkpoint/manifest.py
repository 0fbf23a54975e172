"""``manifest.json``: what files a checkpoint has, and how each must look.

It is written last, so a directory that has one is complete. It carries a digest of itself.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
FORMAT = "lightning-megatron"
VERSION = 2

_BLOCK = 1 << 20
_STRETCH = 1 << 23  # what a thread reads at a time
_THREADS = 4


def is_plain_name(name: str) -> bool:
    """True if a name that a file gives is that of a file beside it, and leads nowhere else."""
    return name not in ("", ".", "..") and not any(sign in name for sign in "/\\\0") and Path(name).name == name


@dataclass(frozen=True)
class FileRecord:
    """One file.

    Attributes:
        bytes: its length.
        hash: BLAKE2b of 256 bits over the CRC-32s of its blocks of 1 MiB. It is to find damage, and no signature: over
            the content itself it would be five times slower than a disk, and a CRC-32 misses one damaged block in four
            billion.
    """

    bytes: int
    hash: str


@dataclass(frozen=True)
class Manifest:
    """What is in ``manifest.json``.

    Attributes:
        layout: fields of the resolved ``ParallelLayout`` that the checkpoint was saved under.
        files: every other file of the directory, by name.
        torch: version that wrote it.
        version: version of the format.
    """

    layout: Mapping[str, Any]
    files: Mapping[str, FileRecord]
    torch: str
    version: int = VERSION

    def render(self) -> str:
        """The text of the file; there is only one for a given manifest, so that any edit shows."""
        content = {"format": FORMAT, **asdict(self)}
        digest = _digest(json.dumps(content, sort_keys=True).encode())
        return json.dumps({**content, "digest": digest}, indent=1, sort_keys=True) + "\n"

    @classmethod
    def parse(cls, text: str) -> Manifest:
        """Read the text of the file.

        Raises:
            ValueError: if it is not what :meth:`render` gives.
        """
        try:
            content = json.loads(text)
            if content["format"] != FORMAT:
                raise ValueError(f"the format is {content['format']!r}, not {FORMAT!r}")
            if (version := content["version"]) != VERSION:
                raise ValueError(f"it has format version {version}, this package knows {VERSION}")
            files = {name: FileRecord(**record) for name, record in content["files"].items()}
            if outside := [name for name in files if not is_plain_name(name)]:
                raise ValueError(f"it names {', '.join(map(repr, outside))}, no files of its directory")
            manifest = cls(content["layout"], files, content["torch"], content["version"])
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"a field is missing or wrong: {error!r}") from None
        if manifest.render() != text:
            raise ValueError("its digest does not match: it was edited or damaged")
        return manifest


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint directory.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it was edited or damaged.
    """
    return Manifest.parse((path / MANIFEST).read_bytes().decode())


def record(file: Path) -> FileRecord:
    """Length and hash of a file as it is on disk now."""
    length = file.stat().st_size
    with ThreadPoolExecutor(_THREADS) as threads:
        sums = threads.map(lambda start: _block_sums(file, start), range(0, length, _STRETCH))
        return FileRecord(length, _digest(b"".join(sums)))


def _block_sums(file: Path, start: int) -> bytes:
    """The CRC-32 of each block from ``start`` on, four bytes each."""
    found: list[bytes] = []
    buffer = memoryview(bytearray(_BLOCK))
    with file.open("rb") as stream:
        stream.seek(start)
        while len(found) * _BLOCK < _STRETCH and (count := stream.readinto(buffer)):
            found.append(zlib.crc32(buffer[:count]).to_bytes(4, "big"))
    return b"".join(found)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=32).hexdigest()
