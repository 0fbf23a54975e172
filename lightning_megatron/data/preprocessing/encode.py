"""Tokenization of lines, in a worker or in the main process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.indexed import optimal_dtype
from lightning_megatron.data.preprocessing import sentences
from lightning_megatron.data.preprocessing.textfiles import LONGEST_LINE, BrokenLineError, LineReader, Source, text_of
from lightning_megatron.data.preprocessing.token_bytes import TokenBytes
from lightning_megatron.data.preprocessing.word_cuts import WordCuts
from lightning_megatron.data.tokenizers import FastTokenizer, Tokenizer, build_tokenizer
from lightning_megatron.errors import ConfigError, DataError, Problem

_LINES_A_TASK = 1024
_BYTES_A_TASK = 1 << 18
_NAMED = 5


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

    @property
    def file(self) -> str | None:
        """File or directory that its vocabulary is in."""
        return self.path or self.vocab_file

    @property
    def source(self) -> str:
        """Name of the tokenizer in errors."""
        return f"the tokenizer {self.file or self.type}"

    def absolute(self) -> dict[str, Any]:
        """Its arguments with absolute paths, for a process in another directory."""
        given = asdict(self)
        return given | {k: os.path.abspath(given[k]) for k in ("path", "vocab_file", "merge_file") if given[k]}


@dataclass(frozen=True)
class EncodeOptions:
    """Arguments of :func:`~lightning_megatron.data.preprocessing.preprocess.preprocess` that tokens depend on."""

    tokenizer: TokenizerSpec
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    split_sentences: bool = False
    keep_newlines: bool = False
    longest_line: int = LONGEST_LINE
    strict: bool = False


@dataclass(frozen=True)
class Lines:
    """Consecutive lines of one source."""

    source: Source
    numbered: list[tuple[int, bytes]]


@dataclass(frozen=True)
class EncodedPart:
    """Tokens of some documents under one key.

    Attributes:
        tokens: ``[t]`` ids.
        lengths: ``[s]`` tokens of each sequence.
        sequences: ``[d]`` sequences of each document.
    """

    tokens: NDArray[Any]
    lengths: NDArray[np.int64]
    sequences: NDArray[np.int64]


@dataclass
class LeftOut:
    """Broken lines: their number, and the errors of the first ones.

    Attributes:
        count: number of lines.
        named: errors of the first ones.
    """

    count: int = 0
    named: list[str] = field(default_factory=list)

    def add(self, other: LeftOut) -> None:
        """Add the broken lines of a later part of the input."""
        self.count += other.count
        self.named += other.named[: _NAMED - len(self.named)]


@dataclass(frozen=True)
class Encoded:
    """Documents of a task, tokenized.

    Attributes:
        parts: tokens by key.
        documents: number of documents.
        size: bytes of their lines.
        left_out: broken lines.
    """

    parts: dict[str, EncodedPart]
    documents: int
    size: int
    left_out: LeftOut


class Encoder:
    """Tokenizer of lines.

    Args:
        options: arguments that tokens depend on.

    Raises:
        ConfigError: if there is no end-of-document token to append.
    """

    def __init__(self, options: EncodeOptions) -> None:
        spec = options.tokenizer
        tokenizer = spec.build()
        self._options = options
        self.dtype = optimal_dtype(tokenizer.vocab_size)
        cuts = WordCuts.of(tokenizer.description()) if isinstance(tokenizer, FastTokenizer) else None
        try:
            self._bytes = TokenBytes(tokenizer, self.dtype, spec.source, cuts)
            self._nothing = self._bytes.of("")  # tokens around every text
        except OverflowError as error:
            raise DataError(str(error)) from None
        if options.append_eod and tokenizer.eod is None:
            raise ConfigError([Problem("append_eod", True, f"the {spec.type} has no end-of-document token")])
        eod = np.array([tokenizer.eod], self.dtype).tobytes() if options.append_eod else b""
        self._eod = b"" if self._nothing.endswith(eod) else eod  # it ends its texts itself
        self._split: Callable[[str], list[str]] = (
            partial(sentences.split_sentences, keep_newlines=options.keep_newlines)
            if options.split_sentences
            else lambda text: [text]
        )
        self._looks = 0

    def __call__(self, lines: Lines, *, lenient: bool = False) -> Encoded:
        """Tokenize lines.

        Args:
            lines: the lines.
            lenient: True to leave out broken ones even if the options are strict.

        Raises:
            DataError: for a broken line, if the options are strict.
        """
        left_out, size = LeftOut(), 0
        documents: list[dict[str, list[bytes]]] = []
        for number, line in lines.numbered:
            size += len(line)
            try:
                texts = text_of(line, self._options.keys)
                documents.append({key: self._sequences(text) for key, text in texts.items()})
            except OverflowError as error:
                raise lines.source.at(number, str(error)) from None
            except BrokenLineError as fault:
                if self._options.strict and not lenient:
                    raise lines.source.at(number, fault.fault, fault.do) from None
                self._leave_out(left_out, lines.source, number, fault)
        parts = {key: self._part([document[key] for document in documents]) for key in self._options.keys}
        return Encoded(parts, len(documents), size, left_out)

    def _leave_out(self, left_out: LeftOut, source: Source, number: int, fault: BrokenLineError) -> None:
        left_out.count += 1
        # In a range of a file, finding the number of a line takes a pass over all of the file before it.
        if len(left_out.named) < _NAMED and (not source.start or self._looks < _NAMED):
            self._looks += bool(source.start)
            left_out.named.append(str(source.at(number, fault.fault, fault.do)))

    def _sequences(self, text: str) -> list[bytes]:
        try:
            found = [tokens for part in self._split(text) if (tokens := self._bytes.of(part)) != self._nothing]
        except DataError as error:
            raise BrokenLineError(str(error), "repair or remove the line") from None
        if found and self._eod:
            found[-1] += self._eod
        return found

    def _part(self, documents: Sequence[list[bytes]]) -> EncodedPart:
        flat = [tokens for document in documents for tokens in document]
        lengths = np.fromiter(map(len, flat), np.int64, len(flat)) // self.dtype.itemsize
        sequences = np.fromiter(map(len, documents), np.int64, len(documents))
        return EncodedPart(np.frombuffer(b"".join(flat), self.dtype), lengths, sequences)


def tasks(reader: LineReader, source: Source) -> Iterator[Lines]:
    """Lines of a source in tasks of a bounded size."""
    batch: list[tuple[int, bytes]] = []
    size = 0
    for number, line in reader:
        batch.append((number, line))
        size += len(line)
        if len(batch) >= _LINES_A_TASK or size >= _BYTES_A_TASK:
            yield Lines(source, batch)
            batch, size = [], 0
    if batch:
        yield Lines(source, batch)
