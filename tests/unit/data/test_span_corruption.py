"""Samples of T5: gaps, sentinels, lengths of spans against the truncated geometric distribution, and padding."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.random import RandomState

from lightning_megatron import ConfigError
from lightning_megatron.data import DataError, IndexedDataset, IndexedDatasetWriter
from lightning_megatron.encoders.sentences.masking import MaskingRule, choose_runs
from lightning_megatron.encoders.t5.dataset import SPANS, SpanVocabulary, T5Dataset, corrupted

SIZE, BOS, EOS, PAD = 1000, 1, 2, 0
SENTINELS = tuple(range(999, 899, -1))
WORDS = SpanVocabulary(SENTINELS, BOS, EOS, PAD, np.arange(SIZE) % 3 == 2)


def restored(text: list[int], gaps: list[int]) -> list[int]:
    """The text without gaps, from an encoder's text and a decoder's output."""
    inside: dict[int, list[int]] = {}
    for token in gaps:
        if token in SENTINELS:
            inside[token] = []
            last = token
        else:
            inside[last].append(token)
    return [each for token in text for each in inside.get(token, [token])]


@pytest.fixture
def data(tmp_path: Path) -> IndexedDataset:
    rng = RandomState(5)
    with IndexedDatasetWriter(tmp_path / "corpus", np.uint16) as writer:
        for _ in range(60):
            lengths = rng.randint(3, 40, rng.randint(1, 9)).tolist()
            writer.add_document(rng.randint(10, 900, sum(lengths)), lengths)
    return IndexedDataset(tmp_path / "corpus")


def test_text_and_gaps_are_the_whole_text_and_fifteen_percent_of_it() -> None:
    rng = RandomState(1)
    for length in (10, 63, 254, 510):
        for _ in range(20):
            text = rng.randint(10, 900, length)
            found = corrupted(text, WORDS, SPANS, rng, length)
            assert restored(found.text.tolist(), found.gaps.tolist()) == text.tolist()
            used = [token for token in found.text.tolist() if token in SENTINELS]
            assert used == list(SENTINELS[: len(used)])
            assert [token for token in found.gaps.tolist() if token in SENTINELS] == used
            gone = len(found.gaps) - len(used)
            assert len(found.text) == length - gone + len(used)
            assert gone <= round(0.15 * length) or gone == 1


def test_lengths_of_spans_are_geometric_and_end_at_ten_words() -> None:
    words, lengths = [[position] for position in range(20000)], Counter[int]()
    for seed in range(40):
        lengths.update(len(run) for run in choose_runs(words, 400, SPANS, RandomState(seed)))
    total = sum(lengths.values())
    shares = {n: 0.2 * 0.8 ** (n - 1) for n in range(1, 10)} | {10: 0.8**9}
    assert {n: count / total for n, count in lengths.items()} == pytest.approx(shares, abs=0.025)


def test_gaps_begin_and_end_with_whole_words_and_there_are_as_many_as_sentinels() -> None:
    rng = RandomState(3)
    few = SpanVocabulary(SENTINELS[:2], BOS, EOS, PAD, WORDS.continues)
    for _ in range(100):
        text = rng.randint(10, 900, 200)
        found = corrupted(text, few, MaskingRule(0.5, max_ngram=1), rng, 200)
        assert sum(token in SENTINELS for token in found.text.tolist()) == 2
        after = [b for a, b in zip(found.text[:-1], found.text[1:], strict=True) if a in SENTINELS]
        assert not any(WORDS.continues[token] for token in after if token not in SENTINELS)


def test_items_are_shifted_padded_and_determined(data: IndexedDataset) -> None:
    dataset = T5Dataset(data, vocabulary=WORDS, seq_length=64, decoder_seq_length=32, seed=3)
    again = T5Dataset(data, vocabulary=WORDS, seq_length=64, decoder_seq_length=32, seed=3)
    for number in range(len(dataset)):
        item = dataset[number]
        assert all(torch.equal(value, again[number][name]) for name, value in item.items())
        labels, entering = item["labels"].tolist(), item["decoder_tokens"].tolist()
        count = sum(label != -100 for label in labels)
        assert entering == [BOS, *labels[: count - 1]] + [PAD] * (32 - count)
        assert labels[count - 1] == EOS
        length = int(item["padding_mask"].sum())
        assert item["padding_mask"].tolist() == [1] * length + [0] * (64 - length)
        whole = restored(item["tokens"].tolist()[:length], labels[: count - 1])
        begin, end, target = dataset.index[number].tolist()
        assert whole == np.concatenate([data.get(i) for i in range(begin, end)])[:target].tolist()
    assert (dataset[None]["labels"] == -100).all()


def test_what_does_not_fit_is_named(data: IndexedDataset) -> None:
    with pytest.raises(DataError, match="decoder_seq_length above 4"):
        _ = [T5Dataset(data, vocabulary=WORDS, seq_length=256, decoder_seq_length=4)[i] for i in range(10)]
    nothing = SpanVocabulary((), BOS, EOS, PAD, WORDS.continues)
    with pytest.raises(ConfigError, match=r"seq_length=3(.|\n)*decoder_seq_length=2(.|\n)*no sentinels"):
        T5Dataset(data, vocabulary=nothing, seq_length=3, decoder_seq_length=2)
