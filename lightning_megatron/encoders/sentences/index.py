"""Order of samples that are whole sentences of one document, by Megatron-LM's rule.

A sample takes sentences until it reaches its target length. Most targets are the longest length; some, at random, are
shorter, so that the model sees short inputs too (https://arxiv.org/abs/1810.04805, appendix A.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from lightning_megatron.data.indexed import IndexedDataset
from lightning_megatron.encoders.sentences.mersenne_twister import draw_64_bits

LONGEST_SENTENCE = 512
"""Documents of several sentences are left out if one is longer than this, since it is no real sentence."""
_SHORTEST = 2
_DRAWN_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class SentenceRule:
    """Rule by which documents become samples.

    Attributes:
        longest: target length of most samples.
        short_probability: share of the samples with a shorter target, of at least 2 tokens.
        fewest_sentences: least number of sentences in a sample.
    """

    longest: int
    short_probability: float
    fewest_sentences: int

    def targets(self, rng: RandomState) -> Iterator[int]:
        """Target lengths of successive samples."""
        period = int(1 / self.short_probability + 0.5) if self.short_probability else 0
        while True:
            for number in rng.randint(0, 1 << 32, _DRAWN_AT_ONCE, np.uint32).tolist():
                is_short = period and number % period == 0
                yield _SHORTEST + number % (self.longest - 1) if is_short else self.longest


def documents_in_share(dataset: IndexedDataset, span: tuple[float, float]) -> NDArray[np.int64]:
    """Numbers of the documents in a share, given by its begin and end between 0 and 1."""
    documents = float(len(dataset.document_indices) - 1)
    return np.arange(*(round(bound * documents) for bound in span))


def usable_documents(
    lengths: NDArray[np.int32], bounds: NDArray[np.int64], documents: NDArray[np.int64], fewest_sentences: int
) -> NDArray[np.int64]:
    """Documents with enough sentences, none of which is too long; a single sentence may have any length.

    Args:
        lengths: tokens of every sentence.
        bounds: sentences of document ``i`` are ``[bounds[i], bounds[i + 1])``.
        documents: numbers of the documents to check.
        fewest_sentences: least number of sentences.
    """
    too_long = np.concatenate(([0], np.cumsum(lengths > LONGEST_SENTENCE)))
    first, end = bounds[documents], bounds[documents + 1]
    fits = (too_long[end] == too_long[first]) | (end - first == 1)
    return documents[(end - first >= fewest_sentences) & fits]


def samples_of_document(
    lengths: list[int], first: int, targets: Iterator[int], fewest_sentences: int
) -> Iterator[tuple[int, int, int]]:
    """First sentence, end, and intended length of each sample of a document.

    Args:
        lengths: tokens of its sentences.
        first: number of its first sentence.
        targets: target lengths; one is drawn for each sample, and one more at the end.
        fewest_sentences: least number of sentences in a sample. What is left of a document joins the last sample if it
            is one sentence, and is else a sample of its own.
    """
    begin = tokens = 0
    target = next(targets)
    for number, length in enumerate(lengths):
        tokens += length
        left = len(lengths) - number - 1
        is_full = tokens >= target and left > 1 and number + 1 - begin >= fewest_sentences
        if is_full or not left:
            yield first + begin, first + number + 1, target
            begin, tokens = number + 1, 0
            target = next(targets)


def build_sentence_index(
    lengths: NDArray[np.int32],
    bounds: NDArray[np.int64],
    documents: NDArray[np.int64],
    rule: SentenceRule,
    *,
    num_samples: int | None,
    seed: int,
) -> NDArray[np.int64]:
    """Samples in the order in which they are read, ``[n, 3]``: first sentence, end, intended length.

    Documents are cut again for each epoch, with other short samples. The samples of all these epochs are shuffled
    together and the first ones taken, with Megatron-LM's generators: a seed gives the same samples as there.

    Args:
        lengths: ``[S]`` tokens of every sentence of the file.
        bounds: ``[D + 1]`` bounds of the documents.
        documents: numbers of the documents of this split.
        rule: rule of the samples.
        num_samples: number of samples, over as many epochs as needed; ``None`` means one epoch.
        seed: seed of the short lengths and of the order.
    """
    targets = rule.targets(RandomState(seed))
    usable = usable_documents(lengths, bounds, documents, rule.fewest_sentences)
    spans = list(zip(bounds[usable].tolist(), bounds[usable + 1].tolist(), strict=True))
    found: list[tuple[int, int, int]] = []
    while spans and len(found) < (1 if num_samples is None else num_samples):
        epoch = (samples_of_document(lengths[a:b].tolist(), a, targets, rule.fewest_sentences) for a, b in spans)
        found.extend(chain.from_iterable(epoch))
    places = np.arange(len(found) - 1, 0, -1)
    others = draw_64_bits(seed + 1, len(places)) % (places + 1).astype(np.uint64)
    for place, other in zip(places.tolist(), others.tolist(), strict=True):
        found[place], found[other] = found[other], found[place]
    return np.array(found[:num_samples], np.int64).reshape(-1, 3)
