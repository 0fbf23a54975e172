"""Samples for BERT: two segments of a document, with masked tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random import RandomState
from numpy.typing import NDArray
from torch import Tensor

from lightning_megatron.data.indexed import IndexedDataset
from lightning_megatron.encoders.sentences.dataset import IGNORED, SentenceDataset
from lightning_megatron.encoders.sentences.index import SentenceRule
from lightning_megatron.encoders.sentences.masking import MaskingRule, Vocabulary, mask_tokens
from lightning_megatron.errors import Problem, raise_if_any

_SPECIAL_TOKENS = 3  # [CLS], and a [SEP] behind each segment
_SWAPPED = 0.5


class BertDataset(SentenceDataset):
    """Documents, stored sentence by sentence, as pairs of segments with masked tokens.

    An item is a dict of int64 ``[seq_length]``: ``tokens``, ``labels`` (the ids of the tokens to guess, -100
    elsewhere), ``token_types`` (0 for the first segment, 1 for the second) and ``padding_mask`` (1 for tokens), and of
    ``is_random``, a scalar: 1 if the two segments are in the wrong order. It depends on its number and the seed alone.
    Item ``None`` is padding: a real sample without labels.

    Args:
        dataset: token files, made with ``preprocess --split-sentences``.
        documents: numbers of the documents to read, ``[n]``; ``None`` means all.
        vocabulary: tokens that samples are made with.
        seq_length: tokens of a sample, special tokens and padding counted.
        num_samples: number of samples, documents are repeated as needed; ``None`` means one epoch.
        seed: seed of the samples and their order.
        split_name: ``train``, ``valid`` or ``test``, used in the cache and in messages.
        masking: rule by which tokens are masked.
        short_probability: share of the samples that are made shorter than they could be.
        cache_dir: directory of the index arrays; ``None`` means ``cache/GPTDataset_indices`` beside the files, or
            memory if that cannot be written.

    Raises:
        ConfigError: if an argument cannot work.
        DataError: if no document has two sentences, or ``cache_dir`` cannot be written.
    """

    label_keys = ("labels", "is_random")

    def __init__(
        self,
        dataset: IndexedDataset,
        documents: NDArray[Any] | None = None,
        *,
        vocabulary: Vocabulary,
        seq_length: int,
        num_samples: int | None = None,
        seed: int = 1234,
        split_name: str = "train",
        masking: MaskingRule | None = None,
        short_probability: float = 0.1,
        cache_dir: str | Path | None = None,
    ) -> None:
        raise_if_any(_problems(seq_length, num_samples, short_probability))
        self.vocabulary, self.seq_length, self.masking = vocabulary, seq_length, masking or MaskingRule()
        rule = SentenceRule(seq_length - _SPECIAL_TOKENS, short_probability, fewest_sentences=2)
        super().__init__(
            dataset,
            documents,
            rule,
            num_samples=num_samples,
            seed=seed,
            split_name=split_name,
            cache_dir=cache_dir,
        )

    def sample(self, number: int) -> dict[str, Tensor]:
        """The sample with this number."""
        pair = self.segments(number)
        words, length = self.vocabulary, self.seq_length
        end = [words.sep] if len(pair.second) else []
        text = np.concatenate(([words.cls], pair.first, [words.sep], pair.second, end)).astype(np.int64)
        seen, positions = mask_tokens(text, words, self.masking, pair.rng, pair.target)
        tokens, labels = np.full(length, words.pad), np.full(length, IGNORED)
        types, mask = np.zeros((2, length), np.int64)
        tokens[: len(text)], mask[: len(text)] = seen, 1
        types[len(pair.first) + 2 : len(text)] = 1
        labels[positions] = text[positions]
        arrays = {"tokens": tokens, "labels": labels, "token_types": types, "padding_mask": mask}
        found = {name: torch.from_numpy(array.astype(np.int64)) for name, array in arrays.items()}
        return found | {"is_random": torch.tensor(int(pair.is_random))}

    def segments(self, number: int) -> Segments:
        """The two segments of a sample, before masking.

        Args:
            number: number of the sample, at least 0.
        """
        sentences, target, rng = self.sentences(number)
        pivot = rng.randint(1, len(sentences)) if len(sentences) > 2 else 1
        one, other = np.concatenate(sentences[:pivot]), np.concatenate(sentences[pivot:])
        is_random = bool(rng.random_sample() < _SWAPPED)
        if is_random:
            one, other = other, one
        return Segments(*truncated(one, other, target, rng), is_random, rng, target)


class Segments(NamedTuple):
    """Two segments of a document.

    Attributes:
        first: tokens of the first one.
        second: tokens of the second one.
        is_random: True if they are in the wrong order.
        rng: random stream of the sample.
        target: target length of the sample.
    """

    first: NDArray[np.int64]
    second: NDArray[np.int64]
    is_random: bool
    rng: RandomState
    target: int


def truncated(
    one: NDArray[np.int64], other: NDArray[np.int64], longest: int, rng: RandomState
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Both segments, truncated to at most ``longest`` tokens together.

    The longer one loses a token, at random at its start or end, until they fit; if both are equally long, the second
    one does.
    """
    bounds = [[0, len(one)], [0, len(other)]]
    for at_begin in (rng.random_sample(max(0, len(one) + len(other) - longest)) < 0.5).tolist():
        (a, b), (c, d) = bounds
        longer = bounds[0 if b - a > d - c else 1]
        if at_begin:
            longer[0] += 1
        else:
            longer[1] -= 1
    return one[slice(*bounds[0])], other[slice(*bounds[1])]


def _problems(seq_length: int, num_samples: int | None, short_probability: float) -> list[Problem]:
    problems = []
    if seq_length < _SPECIAL_TOKENS + 2:
        least = _SPECIAL_TOKENS + 2
        reason = f"{_SPECIAL_TOKENS} special tokens and one of each segment are {least}"
        problems.append(Problem("seq_length", seq_length, reason, (least,)))
    if num_samples is not None and num_samples < 0:
        problems.append(Problem("num_samples", num_samples, "cannot be negative", (0, None)))
    if not 0 <= short_probability <= 1:
        problems.append(Problem("short_probability", short_probability, "must be at least 0 and at most 1", (0.1,)))
    return problems
