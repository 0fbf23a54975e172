"""Numbers of documents, tokens and lengths in a pair of token files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lightning_megatron.data.indexed import IndexedDataset, tokens_path
from lightning_megatron.data.indexed_writer import blocks

_PERCENTS = (5, 50, 95)
_BLOCK = 1 << 22


@dataclass(frozen=True)
class Statistics:
    """Counts of one pair.

    Attributes:
        dtype: type of a token.
        documents: number of documents.
        empty: documents without a token.
        sequences: number of sequences: sentences, or documents.
        tokens: number of tokens.
        size: bytes of ``.bin``.
        least: smallest token; ``None`` without any.
        largest: largest token.
        ends: tokens that are the end-of-document token; ``None`` if that is not known.
        shortest: tokens of the shortest document.
        mean: mean tokens of a document.
        longest: tokens of the longest document.
        percentiles: tokens of a document by percent of the documents that are not longer.
    """

    dtype: str
    documents: int
    empty: int
    sequences: int
    tokens: int
    size: int
    least: int | None
    largest: int | None
    ends: int | None
    shortest: int
    mean: float
    longest: int
    percentiles: Mapping[int, int]


def statistics(dataset: IndexedDataset, eod: int | None = None) -> Statistics:
    """Statistics of a pair; reads all of it, in blocks.

    Args:
        dataset: the pair.
        eod: end-of-document token, to count.
    """
    lengths = document_lengths(dataset)
    least, largest, ends = _of_tokens(dataset, eod)
    some = lengths if len(lengths) else np.zeros(1, np.int64)
    points = np.percentile(some, _PERCENTS, method="inverted_cdf").tolist()
    return Statistics(
        dtype=dataset.dtype.name,
        documents=len(lengths),
        empty=int(np.count_nonzero(lengths == 0)),
        sequences=len(dataset),
        tokens=int(lengths.sum()),
        size=tokens_path(dataset.prefix).stat().st_size,
        least=least,
        largest=largest,
        ends=ends,
        shortest=int(some.min()),
        mean=float(some.mean()),
        longest=int(some.max()),
        percentiles=dict(zip(_PERCENTS, map(int, points), strict=True)),
    )


def document_lengths(dataset: IndexedDataset) -> np.ndarray:
    """Tokens of each document, ``[documents]`` int64."""
    ends = np.zeros(len(dataset) + 1, np.int64)
    at = 1
    for part in blocks(dataset.sequence_lengths):
        ends[at : at + len(part)] = ends[at - 1] + np.cumsum(part, dtype=np.int64)
        at += len(part)
    return np.diff(ends[dataset.document_indices])


def _of_tokens(dataset: IndexedDataset, eod: int | None) -> tuple[int | None, int | None, int | None]:
    least: int | None = None
    largest: int | None = None
    ends = 0
    for start in range(0, len(dataset.tokens), _BLOCK):
        part = dataset.read(start, min(start + _BLOCK, len(dataset.tokens)))
        low, high = int(part.min()), int(part.max())
        least = low if least is None else min(least, low)
        largest = high if largest is None else max(largest, high)
        ends += 0 if eod is None else int(np.count_nonzero(part == eod))
    return least, largest, None if eod is None else ends
