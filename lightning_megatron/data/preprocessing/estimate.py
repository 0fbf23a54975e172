"""Size of the output, estimated from samples of the input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from lightning_megatron.data.preprocessing.encode import Encoded, Encoder, Lines
from lightning_megatron.data.preprocessing.textfiles import LineReader, Source, is_compressed
from lightning_megatron.errors import DataError
from lightning_megatron.files.free_space import readable

_FILES = 8
_LINES = 64
_TEXT = 1 << 18
_STORED = 1 << 20
"""Stored bytes to read of a file: readers of compressed files read ahead, and have no exact position at first."""

_FURTHER = 1 << 24


@dataclass(frozen=True)
class Estimate:
    """Expected output.

    Attributes:
        documents: number of documents.
        tokens: number of tokens under all keys.
        size: bytes of all pairs.
    """

    documents: int
    tokens: int
    size: int

    def __str__(self) -> str:
        return f"about {self.documents:,} documents, {self.tokens:,} tokens, {readable(self.size)}"


def estimate(sources: Sequence[Source], encoder: Encoder, longest: int) -> Estimate:
    """Expected output of some sources.

    Args:
        sources: the input.
        encoder: encoder of its lines.
        longest: bytes of a line at most.

    Raises:
        DataError: if a source cannot be read, or no line of the samples is a document.
    """
    alike: dict[str, list[Source]] = {}  # a byte of a compressed file stands for more text
    for source in sources:
        alike.setdefault(source.path.suffix if is_compressed(source.path) else "", []).append(source)
    samples = [sample for group in alike.values() for sample in _samples(group, encoder, longest)]
    faults = [fault for encoded, _ in samples for fault in encoded.left_out.named]
    if faults and not any(encoded.documents for encoded, _ in samples):
        raise DataError(f"none of the first lines is a document: {faults[0]}")

    def whole(count: Callable[[Encoded], int]) -> int:
        return round(sum(longer * count(encoded) for encoded, longer in samples))

    return Estimate(whole(lambda encoded: encoded.documents), whole(_tokens), whole(_bytes))


def _samples(sources: Sequence[Source], encoder: Encoder, longest: int) -> list[tuple[Encoded, float]]:
    """The first lines of some of these sources, and the factors by which all of them are longer."""
    chosen = [source for source in sources[:: -(-len(sources) // _FILES)] if source.size]
    scale = sum(source.size for source in sources) / max(1, sum(source.size for source in chosen))
    return [(encoded, scale * longer) for encoded, longer in (_sample(source, encoder, longest) for source in chosen)]


def _sample(source: Source, encoder: Encoder, longest: int) -> tuple[Encoded, float]:
    """The first lines of a source, and the factor by which the whole source is longer."""
    reader = LineReader(source, longest)
    lines = iter(reader)
    taken: list[tuple[int, bytes]] = []
    text = 0
    for number, line in islice(lines, _LINES):
        taken.append((number, line))
        text += len(line)
        if text >= _TEXT:
            break
    further = text
    while reader.consumed < _STORED and further < _FURTHER:
        line = next(lines, (0, b""))[1]
        if not line:
            break
        further += len(line)
    scale = source.size / max(1, reader.consumed) * further / max(1, text)
    return encoder(Lines(source, taken), lenient=True), scale


def _tokens(encoded: Encoded) -> int:
    return sum(part.tokens.size for part in encoded.parts.values())


def _bytes(encoded: Encoded) -> int:
    return sum(p.tokens.nbytes + 12 * p.lengths.size + 8 * p.sequences.size for p in encoded.parts.values())
