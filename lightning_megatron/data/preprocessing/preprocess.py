"""Conversion of JSON lines to token files."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from lightning_megatron.data.indexed_writer import IndexedDatasetWriter
from lightning_megatron.data.preprocessing.encode import EncodeOptions, Encoder, LeftOut, Lines, TokenizerSpec, tasks
from lightning_megatron.data.preprocessing.estimate import estimate
from lightning_megatron.data.preprocessing.parts import PartsFolder, cut
from lightning_megatron.data.preprocessing.progress import DocumentProgress, Log
from lightning_megatron.data.preprocessing.textfiles import LONGEST_LINE, LineReader, Source, expand
from lightning_megatron.data.preprocessing.workers import encoded, write_parts
from lightning_megatron.errors import DataError, Problem, raise_if_any
from lightning_megatron.files.free_space import readable, require_space
from lightning_megatron.files.holding import holding

__all__ = ["TokenizerSpec", "preprocess"]


def preprocess(
    inputs: Sequence[str | Path],
    output_prefix: str | Path,
    tokenizer: TokenizerSpec,
    *,
    json_keys: Sequence[str] = ("text",),
    append_eod: bool = False,
    workers: int = 1,
    partitions: int = 1,
    split_sentences: bool = False,
    keep_newlines: bool = False,
    log_interval: int = 1000,
    log: Log | None = None,
    longest_line: int = LONGEST_LINE,
    strict: bool = False,
    check_space: bool = True,
) -> list[str]:
    """Tokenize documents, one JSON object a line, into ``<output_prefix>_<key>_document.bin`` and ``.idx``.

    The files are the same whatever the numbers of workers and partitions: documents keep the order of the input. They
    appear when all went well, and not at all otherwise. An empty text is an empty document, without an end token, as in
    Megatron. Memory does not grow with the input.

    Args:
        inputs: files or patterns; plain, ``.gz``, ``.xz``, ``.bz2``, ``.zst``.
        output_prefix: prefix of the files to write.
        tokenizer: tokenizer and its files.
        json_keys: keys of the values to tokenize, each into a pair of its own.
        append_eod: end every document with the tokenizer's end-of-document token.
        workers: number of processes that tokenize; 1 is this process. More import this program's main module again, so
            a script that uses them needs ``if __name__ == "__main__":``.
        partitions: number of parts of the input that are written separately, ``workers`` at a time, and merged at the
            end: for more workers than one process can feed. A killed run resumes with the missing parts when it is
            started again. At least as many as workers; fewer if there are fewer compressed files.
        split_sentences: make a sequence of each sentence; the pairs are then called ``<output_prefix>_<key>_sentence``.
        keep_newlines: leave line breaks at the end of a sentence (with ``split_sentences``).
        log_interval: number of documents between two lines of progress.
        log: function that prints a line of progress; default standard error, with a bar if that is a terminal.
        longest_line: bytes of a line at most, decompressed.
        strict: raise for a broken line. Else such lines are left out, counted, and the first ones are named.
        check_space: refuse to begin if the output, as far as samples of the input tell, does not fit on the disk.

    Returns:
        The prefixes written, one a key.

    Raises:
        ConfigError: if an argument cannot work.
        DataError: if a line or a file is faulty, there are no documents, or the disk is too full.
    """
    counts = {
        "workers": workers,
        "partitions": partitions,
        "log_interval": log_interval,
        "longest_line": longest_line,
    }
    problems = [Problem(name, value, "must be at least 1", (1,)) for name, value in counts.items() if value < 1]
    if not json_keys or len(set(json_keys)) < len(json_keys):
        problems.append(Problem("json_keys", list(json_keys), "must be one or more different keys"))
    raise_if_any(problems)
    options = EncodeOptions(
        tokenizer, tuple(json_keys), append_eod, split_sentences, keep_newlines, longest_line, strict
    )
    job = _Job(expand(inputs), str(output_prefix), options, workers, DocumentProgress(log_interval, log))
    return job.run(max(partitions, workers) if partitions > 1 else 1, check_space)


@dataclass(frozen=True)
class _Job:
    """One run of :func:`preprocess`."""

    files: list[Path]
    output_prefix: str
    options: EncodeOptions
    workers: int
    progress: DocumentProgress

    @property
    def prefixes(self) -> dict[str, str]:
        """Prefixes of the output by key."""
        level = "sentence" if self.options.split_sentences else "document"
        return {key: f"{self.output_prefix}_{key}_{level}" for key in self.options.keys}

    def run(self, partitions: int, check_space: bool) -> list[str]:
        """Preprocess the input; returns the prefixes of the output."""
        begun = time.perf_counter()
        encoder = Encoder(self.options)
        self._look_ahead(encoder, twice=partitions > 1, check_space=check_space)
        self.progress.begin(sum(path.stat().st_size for path in self.files))
        try:
            left_out = self._in_parts(partitions, encoder) if partitions > 1 else self._at_once(encoder, begun)
            self.progress.finish()
        finally:
            self.progress.close()
        self._report(left_out, encoder.dtype.itemsize)
        return list(self.prefixes.values())

    def _look_ahead(self, encoder: Encoder, *, twice: bool, check_space: bool) -> None:
        """Report the expected size of the output, and check that it fits on the disk.

        Args:
            encoder: encoder of lines.
            twice: True if the output is written twice, first in parts.
            check_space: True to refuse what does not fit on the disk.
        """
        expected = estimate([Source(path) for path in self.files], encoder, self.options.longest_line)
        free = require_space(expected.size * (1 + twice) if check_space else 0, self.output_prefix)
        self.progress.say(f"Estimate: {expected}; {readable(free)} are free")

    def _at_once(self, encoder: Encoder, begun: float) -> LeftOut:
        left_out, documents, text = LeftOut(), 0, 0
        place = _Place()
        lines = self._tasks(place)
        first = list(islice(lines, 1))
        with ExitStack() as stack:
            writers = {
                key: stack.enter_context(IndexedDatasetWriter(prefix, encoder.dtype))
                for key, prefix in self.prefixes.items()
            }
            found = encoded(chain(first, lines), encoder, self.options, self.workers)
            stack.callback(found.close)
            self.progress.say(f"Time to startup: {time.perf_counter() - begun:.2f}")
            for task in found:
                for key, part in task.parts.items():
                    writers[key].add_documents(part.tokens, part.lengths, part.sequences)
                left_out.add(task.left_out)
                documents, text = documents + task.documents, text + task.size
                self.progress.reach(documents, text, place.stored)
            self._require_documents(documents, left_out)
        return left_out

    def _tasks(self, place: _Place) -> Iterator[Lines]:
        for path in self.files:
            self.progress.say(f"Opening {path}")
            source = Source(path)
            reader = LineReader(source, self.options.longest_line)
            place.enter(reader)
            yield from tasks(reader, source)

    def _in_parts(self, count: int, encoder: Encoder) -> LeftOut:
        folder = Path(f"{self.output_prefix}.parts")
        parts = PartsFolder(folder, cut(self.files, count), self.options)
        folder.mkdir(parents=True, exist_ok=True)
        with holding(folder / "lock") as is_held:
            if not is_held:
                raise DataError.at(folder, "another run is writing its parts", do="wait for it, or take another prefix")
            if parts.prepare():
                done = sum(part.done() is not None for part in parts.parts)
                self.progress.say(f"Going on after {done} of {len(parts.parts)} parts in {folder}")
            else:
                self.progress.say(f"Cut the input into {len(parts.parts)} parts, in {folder}")
            write_parts(parts.parts, self.options, self.workers, self.progress.reach)
            left_out, documents, text = LeftOut(), 0, 0
            for part in parts.parts:
                result = part.done()
                assert result is not None
                left_out.add(result.left_out)
                documents, text = documents + result.documents, text + result.text
            self._require_documents(documents, left_out)
            self.progress.reach(documents, text, sum(part.size for part in parts.parts))
            for number, prefix in enumerate(self.prefixes.values()):
                with IndexedDatasetWriter(prefix, encoder.dtype) as writer:
                    for part in parts.parts:
                        writer.add_index(part.prefix(number))
            parts.remove()
        return left_out

    def _require_documents(self, documents: int, left_out: LeftOut) -> None:
        if documents:
            return
        named = ", ".join(map(str, self.files))
        if left_out.count:
            raise DataError.at(named, f"no documents: all {left_out.count} lines are broken. {left_out.named[0]}")
        raise DataError.at(named, "no documents", do="the corpus is empty: give JSON lines")

    def _report(self, left_out: LeftOut, itemsize: int) -> None:
        for line in left_out.named:
            self.progress.say(f"Left out: {line}")
        if left_out.count:
            self.progress.say(f"Left out {left_out.count} broken lines in all (--strict stops at the first one)")
        for prefix in self.prefixes.values():
            size = Path(f"{prefix}.bin").stat().st_size
            tokens = size // itemsize
            self.progress.say(
                f"Wrote {prefix}.bin and .idx: {self.progress.documents} documents, {tokens:,} tokens, "
                f"{size / 2**20:.2f} MB"
            )


class _Place:
    """Position in the input, over all files."""

    def __init__(self) -> None:
        self._reader: LineReader | None = None
        self._before = 0

    def enter(self, reader: LineReader) -> None:
        """Continue with the next file."""
        self._before, self._reader = self.stored, reader

    @property
    def stored(self) -> int:
        """Bytes read so far, as they are stored."""
        return self._before + (0 if self._reader is None else self._reader.consumed)
