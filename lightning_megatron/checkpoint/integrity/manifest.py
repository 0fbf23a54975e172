"""``manifest.json``: the files of a checkpoint with their lengths and hashes.

It is written last, so a directory that has one is complete. It contains a digest of itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_megatron.checkpoint.integrity.block_sums import FileRange, check_sums
from lightning_megatron.errors import CheckpointError
from lightning_megatron.files.small import read_small

MANIFEST = "manifest.json"
FORMAT = "lightning-megatron"
VERSION = 3
_KNOWN = (2, 3)


def is_plain_name(name: str) -> bool:
    """True for the name of a file in the same directory, False for a path elsewhere."""
    return name not in ("", ".", "..") and not any(sign in name for sign in "/\\\0") and Path(name).name == name


@dataclass(frozen=True)
class FileRecord:
    """One file.

    Attributes:
        bytes: its length.
        hash: BLAKE2b of 256 bits over the CRC-32s of its blocks of 1 MiB. It detects damage, and is no signature: over
            the content itself it would be five times slower than a disk, and a CRC-32 misses one damaged block in four
            billion.
    """

    bytes: int
    hash: str


@dataclass(frozen=True, order=True)
class Progress:
    """Progress of a run at a save: the checkpoint with the greater progress is newer, whatever the clocks say.

    Attributes:
        generation: number of starts in this folder, including restarts from an older checkpoint; a higher generation is
            newer, whatever its step.
        step: number of optimizer steps, by Lightning's count.
    """

    generation: int
    step: int

    def __post_init__(self) -> None:
        if type(self.generation) is not int or type(self.step) is not int:
            raise TypeError(f"{self} is no progress")


@dataclass(frozen=True)
class Manifest:
    """Content of ``manifest.json``.

    Attributes:
        layout: fields of the resolved ``ParallelLayout`` that the checkpoint was saved under.
        files: every other file of the directory, by name.
        torch: torch's version at the save.
        version: version of the format.
        progress: progress of the run; ``None`` if it is unknown, or no run can go on from the checkpoint.
    """

    layout: Mapping[str, Any]
    files: Mapping[str, FileRecord]
    torch: str
    version: int = VERSION
    progress: Progress | None = None

    def render(self) -> str:
        """The text of the file; it is unique for a manifest, so that any edit is detected."""
        content = {"format": FORMAT, **asdict(self)}
        if self.progress is None:
            del content["progress"]
        digest = hash_of(json.dumps(content, sort_keys=True).encode())
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
            if (version := content["version"]) not in _KNOWN:
                known = " and ".join(map(str, _KNOWN))
                raise ValueError(f"it has format version {version}, this package knows {known}")
            files = {name: FileRecord(**record) for name, record in content["files"].items()}
            if outside := [name for name in files if not is_plain_name(name)]:
                raise ValueError(f"it names {', '.join(map(repr, outside))}, no files of its directory")
            progress = Progress(**content["progress"]) if "progress" in content else None
            manifest = cls(content["layout"], files, content["torch"], version, progress)
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
    return Manifest.parse(read_small(path / MANIFEST).decode())


def record(file: Path) -> FileRecord:
    """Length and hash of a file as it is on disk now."""
    length = file.stat().st_size
    return FileRecord(length, hash_of(check_sums([FileRange(file, 0, length)])))


def records(directory: Path, written: Mapping[str, FileRecord]) -> dict[str, FileRecord]:
    """Records of files that have just been written, by name, after a check that the file system shows them.

    Raises:
        CheckpointError: if one is missing or truncated.
    """
    lengths = {name: _length(directory / name) for name in sorted(written)}
    if lost := [name for name, length in lengths.items() if length != written[name].bytes]:
        raise CheckpointError(f"{', '.join(lost)}: missing or truncated after writing")
    return dict(written)


def _length(file: Path) -> int:
    return file.stat().st_size if file.is_file() else -1


def hash_of(content: bytes) -> str:
    """The hash of a text, or of a file, from the checksums of all its blocks."""
    return hashlib.blake2b(content, digest_size=32).hexdigest()
