"""One hostile file a case: which sound folder it stands in, which file it takes the place of, and what it holds."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hostile_payloads as payloads

Spoil = Callable[[Path], object]


@dataclass(frozen=True)
class Case:
    """A hostile file.

    Attributes:
        kind: kind of file, as the table shows it.
        name: name of the trick.
        source: folder of sound files that is copied.
        file: what is spoiled, from that folder on.
        spoil: makes it so, given its path.
        harmless: whether it may also be taken: nothing in it is wrong for every reader.
        errs_with: what the error names in place of the file.
    """

    kind: str
    name: str
    source: str
    file: str
    spoil: Spoil
    harmless: bool = False
    errs_with: str = ""


def writes(content: bytes) -> Spoil:
    return lambda file: file.write_bytes(content)


def becomes(change: Callable[[Any], Any]) -> Spoil:
    """Edit a JSON file."""
    return lambda file: file.write_text(json.dumps(change(json.loads(file.read_text()))))


def device(file: Path) -> None:
    file.unlink(missing_ok=True)
    file.symlink_to("/dev/zero")


def pipe(file: Path) -> None:
    file.unlink(missing_ok=True)
    os.mkfifo(file)


def folder(file: Path) -> None:
    file.unlink(missing_ok=True)
    file.mkdir()


def sparse(file: Path) -> None:
    """A file of 1.5 GiB of zeros that takes no place."""
    file.unlink(missing_ok=True)
    with file.open("wb") as stream:
        stream.truncate(3 * payloads.GIB // 2)


SPECIAL: Mapping[str, Spoil] = {"device": device, "pipe": pipe, "folder": folder}


SOME = ("reduce", "stack-global", "obj", "import", "build-class", "load-bytes", "extension", "persistent")
SOME_GROWING = ("empty", "zeros", "deep-lists", "laughs", "huge-bytes", "huge-long", "list")


def some(found: Mapping[str, bytes], names: Sequence[str]) -> dict[str, bytes]:
    """Those of some names: what reads the other kinds of files reads these, too."""
    return {name: found[name] for name in names}
