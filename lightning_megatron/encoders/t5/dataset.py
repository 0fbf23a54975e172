"""Samples for T5: a text with gaps, and what stood in them (https://arxiv.org/abs/1910.10683)."""

from __future__ import annotations

from dataclasses import dataclass
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
from lightning_megatron.encoders.sentences.masking import MaskingRule, choose_runs, grouped
from lightning_megatron.errors import DataError, Problem, raise_if_any

SPANS = MaskingRule(max_ngram=10, geometric=0.2)
"""Megatron-LM's rule for T5: 15 % of the tokens, in runs of words whose lengths are geometric with a mean of 5."""
_ADDED = 2  # tokens by which the longest text is shorter than the encoder's input


@dataclass(frozen=True, eq=False)
class SpanVocabulary:
    """Tokens that samples are made with.

    Attributes:
        sentinels: tokens in the places of gaps, in the order in which they are used.
        bos: token that begins the decoder's input.
        eos: token that ends the decoder's output.
        pad: padding.
        continues: ``[V]``, True for pieces that continue a word.
    """

    sentinels: tuple[int, ...]
    bos: int
    eos: int
    pad: int
    continues: NDArray[np.bool_]


class Corrupted(NamedTuple):
    """A text with gaps.

    Attributes:
        text: tokens of the encoder, with a sentinel in each gap.
        gaps: sentinel and contents of each gap, one after the other.
    """

    text: NDArray[np.int64]
    gaps: NDArray[np.int64]


class T5Dataset(SentenceDataset):
    """Documents, stored sentence by sentence, as texts with gaps and the contents of the gaps.

    An item is a dict of int64: ``tokens`` and ``padding_mask`` (1 for tokens) ``[seq_length]`` of the encoder, and
    ``decoder_tokens`` and ``labels`` (-100 where there is nothing to predict) ``[decoder_seq_length]`` of the decoder:
    ``[bos, sentinel, gap, sentinel, gap, ...]`` and the same from the second token on, ended by ``eos``. It depends on
    its number and the seed alone. Item ``None`` is padding: a real sample without labels.

    Args:
        dataset: token files, made with ``preprocess --split-sentences``.
        documents: numbers of the documents to read, ``[n]``; ``None`` means all.
        vocabulary: tokens that samples are made with.
        seq_length: tokens of the encoder, padding counted.
        decoder_seq_length: tokens of the decoder, padding counted.
        num_samples: number of samples, documents are repeated as needed; ``None`` means one epoch.
        seed: seed of the samples and their order.
        split_name: ``train``, ``valid`` or ``test``, used in the cache and in messages.
        masking: rule by which gaps are made.
        short_probability: share of the samples that are made shorter than they could be.
        cache_dir: directory of the index arrays; ``None`` means ``cache/GPTDataset_indices`` beside the files, or
            memory if that cannot be written.

    Raises:
        ConfigError: if an argument cannot work.
        DataError: if there is no sentence, or ``cache_dir`` cannot be written.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        documents: NDArray[Any] | None = None,
        *,
        vocabulary: SpanVocabulary,
        seq_length: int,
        decoder_seq_length: int,
        num_samples: int | None = None,
        seed: int = 1234,
        split_name: str = "train",
        masking: MaskingRule = SPANS,
        short_probability: float = 0.1,
        cache_dir: str | Path | None = None,
    ) -> None:
        raise_if_any(_problems(seq_length, decoder_seq_length, vocabulary))
        self.vocabulary, self.masking = vocabulary, masking
        self.seq_length, self.decoder_seq_length = seq_length, decoder_seq_length
        rule = SentenceRule(seq_length - _ADDED, short_probability, fewest_sentences=1)
        super().__init__(
            dataset,
            documents,
            rule,
            num_samples=num_samples,
            seed=seed,
            split_name=split_name,
            cache_dir=cache_dir,
        )

    def text(self, number: int) -> tuple[NDArray[np.int64], RandomState, int]:
        """Tokens of a sample before corruption, its random stream, and its intended length.

        Args:
            number: number of the sample, at least 0.
        """
        sentences, target, rng = self.sentences(number)
        return np.concatenate(sentences)[:target], rng, target

    def sample(self, number: int) -> dict[str, Tensor]:
        """The sample with this number.

        Raises:
            DataError: if its gaps do not fit into the decoder.
        """
        words = self.vocabulary
        text, rng, target = self.text(number)
        found = corrupted(text, words, self.masking, rng, target)
        entering, leaving = np.append(words.bos, found.gaps), np.append(found.gaps, words.eos)
        if len(entering) > self.decoder_seq_length:
            fault = f"{self.split_name} sample {number} has {len(entering)} tokens to predict"
            do = f"give a decoder_seq_length above {self.decoder_seq_length}, or mask fewer tokens"
            raise DataError.at(self.dataset.prefix, fault, do=do)
        padded = {
            "tokens": (found.text, words.pad, self.seq_length),
            "padding_mask": (np.ones_like(found.text), 0, self.seq_length),
            "decoder_tokens": (entering, words.pad, self.decoder_seq_length),
            "labels": (leaving, IGNORED, self.decoder_seq_length),
        }
        return {name: _padded(*given) for name, given in padded.items()}


def corrupted(
    text: NDArray[np.int64], vocabulary: SpanVocabulary, rule: MaskingRule, rng: RandomState, target: int
) -> Corrupted:
    """Cut gaps into a text, each replaced by a sentinel of its own.

    Args:
        text: tokens.
        vocabulary: tokens that samples are made with.
        target: target length of the sample.
    """
    words = grouped(list(range(len(text))), vocabulary.continues[text] & rule.whole_words)
    runs = choose_runs(words, rule.budget(len(text), target), rule, rng, most=len(vocabulary.sentinels))
    kept: list[int] = []
    gaps: list[int] = []
    start = 0
    for sentinel, run in zip(vocabulary.sentinels, sorted(runs), strict=False):
        kept += [*text[start : run[0]].tolist(), sentinel]
        gaps += [sentinel, *text[run].tolist()]
        start = run[-1] + 1
    kept += text[start:].tolist()
    return Corrupted(np.array(kept, np.int64), np.array(gaps, np.int64))


def _padded(values: NDArray[np.int64], pad: int, length: int) -> Tensor:
    found = np.full(length, pad, np.int64)
    found[: len(values)] = values
    return torch.from_numpy(found)


def _problems(seq_length: int, decoder_seq_length: int, vocabulary: SpanVocabulary) -> list[Problem]:
    found = []
    for name, given, least in (("seq_length", seq_length, 4), ("decoder_seq_length", decoder_seq_length, 3)):
        if given < least:
            found.append(Problem(name, given, f"a sample has at least {least} tokens", (least,)))
    if not vocabulary.sentinels:
        found.append(Problem("vocabulary", "no sentinels", "each gap needs one"))
    return found
