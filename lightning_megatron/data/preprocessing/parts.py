"""Input cut into parts, each with its own token files: several processes write, and a killed run can resume."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_megatron.data.indexed_writer import IndexedDatasetWriter
from lightning_megatron.data.preprocessing.encode import EncodeOptions, Encoder, LeftOut, tasks
from lightning_megatron.data.preprocessing.textfiles import LineReader, Source, is_compressed
from lightning_megatron.data.special_tokens import SETTINGS_FILES
from lightning_megatron.files.growing import written_at_once
from lightning_megatron.files.small import read_object

_FORMAT = 1


@dataclass(frozen=True)
class Done:
    """Result of a part.

    Attributes:
        documents: number of documents.
        text: bytes of their lines.
        left_out: broken lines.
    """

    documents: int
    text: int
    left_out: LeftOut


@dataclass(frozen=True)
class PartFiles:
    """Token files of one part, and the file that says that they are complete.

    Attributes:
        folder: folder of all parts.
        number: number of the part.
        sources: its part of the input.
    """

    folder: Path
    number: int
    sources: tuple[Source, ...]

    def prefix(self, key_number: int) -> str:
        """Prefix of the pair of a key."""
        return str(self.folder / f"part-{self.number:05d}-key-{key_number}")

    @property
    def marker(self) -> Path:
        """File that is written last."""
        return self.folder / f"part-{self.number:05d}.json"

    @property
    def size(self) -> int:
        """Bytes of the input as it is stored."""
        return sum(source.size for source in self.sources)

    def done(self) -> Done | None:
        """The result, if the part is complete."""
        if not self.marker.is_file():
            return None
        content = read_object(self.marker)
        return Done(content["documents"], content["text"], LeftOut(**content["left_out"]))


def cut(files: Sequence[Path], count: int) -> list[tuple[Source, ...]]:
    """Consecutive parts of the input of about equal size; fewer than ``count`` if compressed files cannot be cut."""
    total = sum(path.stat().st_size for path in files)
    parts: list[list[Source]] = [[] for _ in range(count)]
    begin = 0
    for path in files:
        size = path.stat().st_size
        bounds = [0, size]
        if not is_compressed(path):
            inside = (total * k // count - begin for k in range(1, count))
            bounds = sorted({0, size, *_line_starts(path, [at for at in inside if 0 < at < size])})
        for start, stop in pairwise(bounds):
            middle = begin + (start + stop) // 2
            whole = (start, stop) == (0, size)
            parts[min(count - 1, middle * count // max(1, total))].append(
                Source(path) if whole else Source(path, start, stop)
            )
        begin += size
    return [tuple(part) for part in parts if part]


def _line_starts(path: Path, places: Iterable[int]) -> Iterable[int]:
    """For each of some bytes, the first line start at or after it."""
    with path.open("rb") as file:
        for place in places:
            file.seek(place - 1)
            while (read := file.readline(1 << 20)) and not read.endswith(b"\n"):
                pass
            yield file.tell()


class PartsFolder:
    """Folder of the parts of one run, from which a later run with the same input and options resumes.

    Args:
        folder: the folder.
        parts: parts of the input.
        options: options that tokens depend on.
    """

    def __init__(self, folder: Path, parts: Sequence[tuple[Source, ...]], options: EncodeOptions) -> None:
        self.folder = folder
        self.parts = [PartFiles(folder, number, sources) for number, sources in enumerate(parts)]
        self._plan = {
            "format": _FORMAT,
            "options": json.loads(json.dumps(asdict(options))),
            "parts": [[_identity(source) for source in part.sources] for part in self.parts],
            "tokenizer": _tokenizer_files(options),
        }

    def prepare(self) -> bool:
        """Keep the parts of a run with the same input and options, remove others; True if some are complete."""
        plan = self.folder / "plan.json"
        if plan.is_file():
            try:
                if read_object(plan) == self._plan:
                    return any(part.marker.is_file() for part in self.parts)
            except ValueError:  # nothing of ours
                pass
        for left in self.folder.glob("part-*"):
            left.unlink()
        write_json(plan, self._plan)
        return False

    def remove(self) -> None:
        """Remove all parts."""
        shutil.rmtree(self.folder)


def write_part(part: PartFiles, options: EncodeOptions, encoder: Encoder, watch: Any) -> None:
    """Tokenize a part.

    Args:
        part: the part.
        options: options of the run.
        encoder: encoder of lines.
        watch: function of the documents, bytes of text and stored bytes so far; called after each task, and raises to
            end the work.
    """
    documents = text = before = 0
    left_out = LeftOut()
    with ExitStack() as stack:
        writers = {
            key: stack.enter_context(IndexedDatasetWriter(part.prefix(number), encoder.dtype))
            for number, key in enumerate(options.keys)
        }
        for source in part.sources:
            reader = LineReader(source, options.longest_line)
            for task in tasks(reader, source):
                encoded = encoder(task)
                for key, tokens in encoded.parts.items():
                    writers[key].add_documents(tokens.tokens, tokens.lengths, tokens.sequences)
                documents, text = documents + encoded.documents, text + encoded.size
                left_out.add(encoded.left_out)
                watch(documents, text, before + reader.consumed)
            before += source.size
    write_json(part.marker, {"documents": documents, "text": text, "left_out": asdict(left_out)})


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file in one step."""
    with written_at_once(path) as stream:
        stream.write(json.dumps(content).encode())


def _identity(source: Source) -> list[Any]:
    status = source.path.stat()
    return [str(source.path.absolute()), status.st_size, status.st_mtime_ns, source.start, source.stop]


def _tokenizer_files(options: EncodeOptions) -> list[list[Any]]:
    """Sizes and times of the files of a tokenizer, settings beside its file among them."""
    spec = options.tokenizer
    named = [Path(name) for name in (spec.path, spec.vocab_file, spec.merge_file) if name is not None]
    found: list[list[Any]] = []
    for path in named:
        files = sorted(path.glob("*")) if path.is_dir() else [path, *map(path.with_name, SETTINGS_FILES)]
        found += [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files if file.is_file()]
    return found
