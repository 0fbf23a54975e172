"""Conversion of JSON lines to token files."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from multiprocessing import get_all_start_methods, get_context, parent_process
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.indexed import optimal_dtype
from lightning_megatron.data.indexed_writer import IndexedDatasetWriter
from lightning_megatron.data.preprocessing import sentences
from lightning_megatron.data.preprocessing.textfiles import LONGEST_LINE, expand, read_lines, text_of
from lightning_megatron.data.tokenizers import Tokenizer, build_tokenizer
from lightning_megatron.errors import ConfigError, DataError, Problem

_LINES_A_TASK = 64
_TASKS_A_WORKER = 4


@dataclass(frozen=True)
class TokenizerSpec:
    """Arguments of :func:`~lightning_megatron.data.tokenizers.build_tokenizer`, for each worker to build its own."""

    type: str
    path: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_size: int | None = None

    def build(self) -> Tokenizer:
        """Build the tokenizer."""
        return build_tokenizer(
            self.type,
            self.path,
            vocab_file=self.vocab_file,
            merge_file=self.merge_file,
            vocab_size=self.vocab_size,
        )


@dataclass(frozen=True)
class _Lines:
    """Task of one worker: consecutive lines of one file."""

    path: str
    numbered: list[tuple[int, bytes]]


@dataclass(frozen=True)
class _Document:
    """One line, tokenized: tokens and lengths of the sequences, for each key."""

    parts: dict[str, tuple[NDArray[Any], list[int]]]
    size: int


class _Encoder:
    def __init__(
        self, tokenizer: TokenizerSpec, keys: Sequence[str], append_eod: bool, by_sentence: bool, keep_newlines: bool
    ) -> None:
        self.tokenizer = tokenizer.build()
        self._source = f"the tokenizer {tokenizer.path or tokenizer.vocab_file or tokenizer.type}"
        self.dtype = optimal_dtype(self.tokenizer.vocab_size)
        self._keys = keys
        eod = self.tokenizer.eod
        self._eod = [eod] if append_eod and eod is not None else []
        if append_eod and eod is None:
            raise ConfigError([Problem("append_eod", True, f"the {tokenizer.type} has no end-of-document token")])
        self._split: Callable[[str], list[str]] = (
            partial(sentences.split_sentences, keep_newlines=keep_newlines) if by_sentence else lambda text: [text]
        )

    def __call__(self, lines: _Lines) -> list[_Document]:
        return [self._document(lines.path, number, line) for number, line in lines.numbered]

    def _document(self, path: str, number: int, line: bytes) -> _Document:
        texts = text_of(path, number, line, self._keys)
        try:
            parts = {key: self._tokens(text) for key, text in texts.items()}
        except DataError as error:
            raise DataError.at(path, str(error), line=number) from None
        return _Document(parts, len(line))

    def _tokens(self, text: str) -> tuple[NDArray[Any], list[int]]:
        sequences = [ids for part in self._split(text) if (ids := self.tokenizer.encode(part))]
        if sequences and self._eod:
            sequences[-1] = sequences[-1] + self._eod
        flat = [token for ids in sequences for token in ids]
        if flat and max(flat) > (limit := int(np.iinfo(self.dtype).max)):
            fault = f"{self._source} gives the id {max(flat)}, and its vocabulary of {self.tokenizer.vocab_size} tokens"
            raise DataError(f"{fault} is stored in {self.dtype.name}, which ends at {limit}")
        return np.array(flat, self.dtype), [len(ids) for ids in sequences]


_encoder: _Encoder  # of a worker process


def _start_worker(*arguments: Any) -> None:
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the parent ends the work
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    _encoder = _Encoder(*arguments)


def _end_with_the_parent() -> None:
    """End if the parent was killed: workers hold both ends of their queues, and would wait for ever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(lines: _Lines) -> list[_Document]:
    return _encoder(lines)


def preprocess(
    inputs: Sequence[str | Path],
    output_prefix: str | Path,
    tokenizer: TokenizerSpec,
    *,
    json_keys: Sequence[str] = ("text",),
    append_eod: bool = False,
    workers: int = 1,
    split_sentences: bool = False,
    keep_newlines: bool = False,
    log_interval: int = 1000,
    log: Callable[[str], None] | None = None,
    longest_line: int = LONGEST_LINE,
) -> list[str]:
    """Tokenize documents, one JSON object a line, into ``<output_prefix>_<key>_document.bin`` and ``.idx``.

    The files are the same whatever the number of workers: documents keep the order of the input. They appear when all
    went well, and not at all otherwise. An empty text is an empty document, without an end token, as in Megatron.

    Args:
        inputs: files or patterns; plain, ``.gz``, ``.xz``, ``.bz2``, ``.zst``.
        output_prefix: prefix of the files to write.
        tokenizer: tokenizer and its files.
        json_keys: keys of the values to tokenize, each into a pair of its own.
        append_eod: end every document with the tokenizer's end-of-document token.
        workers: number of processes that tokenize; 1 is this process. More import this program's main module again, so
            a script that uses them needs ``if __name__ == "__main__":``.
        split_sentences: make a sequence of each sentence; the pairs are then called ``<output_prefix>_<key>_sentence``.
        keep_newlines: leave line breaks at the end of a sentence (with ``split_sentences``).
        log_interval: number of documents between two lines of progress.
        log: function that prints a line of progress; default standard error.
        longest_line: bytes of a line at most, decompressed.

    Returns:
        The prefixes written, one a key.

    Raises:
        ConfigError: if an argument cannot work.
        DataError: if a line or a file is faulty, or there are no documents.
    """
    counts = {"workers": workers, "log_interval": log_interval, "longest_line": longest_line}
    problems = [Problem(name, value, "must be at least 1", (1,)) for name, value in counts.items() if value < 1]
    if not json_keys or len(set(json_keys)) < len(json_keys):
        problems.append(Problem("json_keys", list(json_keys), "must be one or more different keys"))
    if problems:
        raise ConfigError(problems)
    log = log or (lambda line: print(line, file=sys.stderr, flush=True))
    begun = time.perf_counter()
    files = expand(inputs)
    arguments = (tokenizer, tuple(json_keys), append_eod, split_sentences, keep_newlines)
    encoder = _Encoder(*arguments)
    tasks = _tasks(files, log, longest_line)
    first = list(islice(tasks, 1))
    level = "sentence" if split_sentences else "document"
    prefixes = {key: f"{output_prefix}_{key}_{level}" for key in json_keys}
    with ExitStack() as stack:
        writers = {k: stack.enter_context(IndexedDatasetWriter(p, encoder.dtype)) for k, p in prefixes.items()}
        documents = _documents(chain(first, tasks), encoder, arguments, workers)
        stack.callback(documents.close)
        log(f"Time to startup: {time.perf_counter() - begun:.2f}")
        progress, totals = _Progress(log_interval, log), dict.fromkeys(json_keys, 0)
        for document in documents:
            for key, (tokens, lengths) in document.parts.items():
                writers[key].add_document(tokens, lengths)
                totals[key] += len(tokens)
            progress.add(document.size)
        if not progress.count:
            named = ", ".join(map(str, files))
            raise DataError.at(named, "no documents", do="the corpus is empty: give JSON lines")
        progress.finish()
    for key, prefix in prefixes.items():
        size = Path(f"{prefix}.bin").stat().st_size / 2**20
        log(f"Wrote {prefix}.bin and .idx: {progress.count} documents, {totals[key]:,} tokens, {size:.2f} MB")
    return list(prefixes.values())


def _tasks(files: Sequence[Path], log: Callable[[str], None], longest: int) -> Iterator[_Lines]:
    for path in files:
        log(f"Opening {path}")
        lines = read_lines(path, longest)
        while batch := list(islice(lines, _LINES_A_TASK)):
            yield _Lines(str(path), batch)


def _documents(
    tasks: Iterator[_Lines], encoder: _Encoder, arguments: tuple[Any, ...], workers: int
) -> Generator[_Document, None, None]:
    """Tokenized documents in the order of the input."""
    if workers == 1:
        for task in tasks:
            yield from encoder(task)
        return
    # Only some tasks are under way at any time, since the corpus may be larger than the memory.
    with ProcessPoolExecutor(workers, _processes(), _start_worker, arguments) as pool:
        pending: deque[Future[list[_Document]]] = deque()
        try:
            for task in tasks:
                pending.append(pool.submit(_work, task))
                if len(pending) >= workers * _TASKS_A_WORKER:
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _processes() -> BaseContext:
    """Context of clean processes (a forked child of a process with threads may hang) that import torch only once."""
    if "forkserver" not in get_all_start_methods():
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


class _Progress:
    """Progress in documents and bytes of input, printed at intervals."""

    def __init__(self, interval: int, log: Callable[[str], None]) -> None:
        self._interval, self._log = interval, log
        self._begun = time.perf_counter()
        self.count = self._bytes = 0

    def add(self, size: int) -> None:
        self.count += 1
        self._bytes += size
        if self.count % self._interval == 0:
            self._tell()

    def finish(self) -> None:
        if self.count % self._interval:
            self._tell()

    def _tell(self) -> None:
        seconds = max(time.perf_counter() - self._begun, 1e-9)
        rate, megabytes = self.count / seconds, self._bytes / seconds / 2**20
        self._log(f"Processed {self.count} documents ({rate:.2f} docs/s, {megabytes:.4f} MB/s).")
