"""Samples of BERT: how documents are cut, pairs, truncation, the share of masked tokens and what stands in their place.

Counts are held against the formulas, within four standard deviations of a binomial draw.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice, repeat
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.random import RandomState

from lightning_megatron import ConfigError
from lightning_megatron.data import BertDataset, DataError, IndexedDataset, IndexedDatasetWriter, build_tokenizer
from lightning_megatron.data.tokenizers import BertWordPieceTokenizer
from lightning_megatron.encoders.bert.dataset import truncated
from lightning_megatron.encoders.sentences.index import SentenceRule, samples_of_document, usable_documents
from lightning_megatron.encoders.sentences.masking import MaskingRule, Vocabulary, choose_runs, mask_tokens, words_of

SIZE, CLS, SEP, MASK, PAD = 1000, 1, 2, 3, 0
WORDS = Vocabulary(np.arange(SIZE), CLS, SEP, MASK, PAD, np.arange(SIZE) % 3 == 2)
Write = Callable[[Sequence[Sequence[int]]], BertDataset]


def near(count: float, draws: int, share: float) -> bool:
    """True if so many of so many draws had a chance of ``share`` each."""
    return abs(count - draws * share) <= 4 * (draws * share * (1 - share)) ** 0.5 + 1


@pytest.fixture
def corpus(tmp_path: Path) -> Callable[[Sequence[Sequence[int]]], IndexedDataset]:
    """Documents of sentences of these lengths; tokens of the whole file count up, from 10 to 999 again and again."""

    def write(documents: Sequence[Sequence[int]]) -> IndexedDataset:
        start = 0
        with IndexedDatasetWriter(tmp_path / "corpus", np.uint16) as writer:
            for lengths in documents:
                tokens = 10 + (start + np.arange(sum(lengths))) % (SIZE - 10)
                writer.add_document(tokens, list(lengths))
                start += sum(lengths)
        return IndexedDataset(tmp_path / "corpus")

    return write


def random_documents(count: int) -> list[list[int]]:
    rng = RandomState(5)
    return [rng.randint(3, 40, rng.randint(1, 12)).tolist() for _ in range(count)]


def as_in_megatron(lengths: list[int], targets: Sequence[int], fewest: int) -> list[tuple[int, int, int]]:
    """The rule of Megatron-LM's sample mapping, told with other words: sentences left, sentences taken."""
    found, begin, taken, tokens, left, drawn = [], 0, 0, 0, len(lengths), iter(targets)
    target = next(drawn)
    for number, length in enumerate(lengths):
        tokens, taken, left = tokens + length, taken + 1, left - 1
        if (tokens >= target and left > 1 and taken >= fewest) or left == 0:
            found.append((begin, number + 1, target))
            begin, taken, tokens = number + 1, 0, 0
            target = next(drawn)
    return found


def test_documents_are_cut_by_the_rule() -> None:
    rule, rng = SentenceRule(64, 0.1, 2), RandomState(1)
    for lengths in random_documents(300):
        targets = list(islice(rule.targets(rng), len(lengths) + 1))
        found = list(samples_of_document(lengths, 0, iter(targets), 2))
        assert found == as_in_megatron(lengths, targets, 2)
        assert [begin for begin, _, _ in found] == [0, *(end for _, end, _ in found[:-1])]
        assert found[-1][1] == len(lengths)


def test_one_sample_in_ten_is_short_and_of_any_length() -> None:
    targets = list(islice(SentenceRule(128, 0.1, 2).targets(RandomState(3)), 20000))
    short = [target for target in targets if target < 128]
    assert near(len(short), 20000, 0.1 * 126 / 127)
    assert min(short) == 2
    assert 60 < np.mean(short) < 70
    assert set(islice(SentenceRule(128, 0.0, 2).targets(RandomState(3)), 1000)) == {128}


def test_documents_of_one_sentence_or_with_an_endless_one_are_left_out(
    corpus: Callable[[Sequence[Sequence[int]]], IndexedDataset],
) -> None:
    data = corpus([[5, 5], [5], [5, 600], [], [4, 4, 4]])
    found = usable_documents(data.sequence_lengths, data.document_indices, np.arange(5), 2)
    assert found.tolist() == [0, 4]
    with pytest.raises(DataError, match=r"no document of 2 sentences(.|\n)*--split-sentences"):
        BertDataset(data, np.array([1, 2, 3]), vocabulary=WORDS, seq_length=32)


def test_an_epoch_has_every_sentence_once_and_the_next_one_cuts_anew(
    corpus: Callable[[Sequence[Sequence[int]]], IndexedDataset],
) -> None:
    data = corpus(random_documents(200))
    usable = usable_documents(data.sequence_lengths, data.document_indices, np.arange(200), 2)
    bounds = data.document_indices
    expected = sorted(s for d in usable for s in range(bounds[d], bounds[d + 1]))
    one = BertDataset(data, vocabulary=WORDS, seq_length=64, cache_dir=None)
    assert sorted(s for begin, end, _ in one.index.tolist() for s in range(begin, end)) == expected
    assert one.index.tolist() != sorted(one.index.tolist()), "samples are shuffled"
    three = BertDataset(data, vocabulary=WORDS, seq_length=64, num_samples=3 * len(one))
    assert len(three) == 3 * len(one)
    seen = Counter(s for begin, end, _ in three.index.tolist() for s in range(begin, end))
    assert set(seen) == set(expected)
    assert set(seen.values()) <= {2, 3, 4}


def test_a_sample_is_two_segments_of_one_document(corpus: Callable[[Sequence[Sequence[int]]], IndexedDataset]) -> None:
    documents = random_documents(300)
    data = corpus(documents)
    dataset = BertDataset(data, vocabulary=WORDS, seq_length=64, num_samples=2000, seed=7)
    swapped, whole = 0, np.concatenate([data.get(i) for i in range(len(data))])
    starts = np.concatenate(([0], np.cumsum(data.sequence_lengths)))
    for number in range(len(dataset)):
        begin, end, target = dataset.index[number].tolist()
        first, second, is_random, *_ = dataset.segments(number)
        assert 0 < len(first) + len(second) <= min(target, starts[end] - starts[begin])
        assert len(first) + len(second) == min(target, starts[end] - starts[begin])
        text = whole[starts[begin] : starts[end]].tolist()
        one, other = (second, first) if is_random else (first, second)
        joined = " ".join(map(str, text))
        assert " ".join(map(str, one.tolist())) in joined
        assert " ".join(map(str, other.tolist())) in joined
        if not set(one.tolist()) & set(other.tolist()) and len(one) and len(other) and len(set(text)) == len(text):
            assert text.index(one[0]) < text.index(other[0]), "the order of the document"
        swapped += is_random
    assert near(swapped, len(dataset), 0.5)


def test_the_longer_segment_loses_tokens_at_both_ends() -> None:
    one, other = np.arange(30), np.arange(100, 110)
    ends = Counter[int]()
    for seed in range(400):
        a, b = truncated(one, other, 24, RandomState(seed))
        assert (len(a), len(b)) == (14, 10)
        assert a.tolist() == list(range(a[0], a[0] + 14))
        ends[int(a[0])] += 1
    assert np.mean(list(ends.elements())) == pytest.approx(8, abs=0.4)
    a, b = truncated(one, other, 10, RandomState(0))
    assert (len(a), len(b)) == (5, 5)
    assert truncated(one, other, 40, RandomState(0))[0] is not None


def test_items_are_padded_and_marked(corpus: Callable[[Sequence[Sequence[int]]], IndexedDataset]) -> None:
    dataset = BertDataset(corpus(random_documents(50)), vocabulary=WORDS, seq_length=64)
    for number in range(len(dataset)):
        item, (first, second, is_random, *_) = dataset[number], dataset.segments(number)
        tokens, labels, mask = item["tokens"], item["labels"], item["padding_mask"]
        count = len(first) + len(second) + 3
        assert {name: value.shape for name, value in item.items() if name != "is_random"} == dict.fromkeys(
            ("tokens", "labels", "token_types", "padding_mask"), (64,)
        )
        assert {value.dtype for value in item.values()} == {torch.int64}
        assert mask.tolist() == [1] * count + [0] * (64 - count)
        assert item["token_types"].tolist() == [0] * (len(first) + 2) + [1] * (len(second) + 1) + [0] * (64 - count)
        original = torch.where(labels == -100, tokens, labels)
        text = [CLS, *first.tolist(), SEP, *second.tolist(), SEP]
        assert original.tolist() == text + [PAD] * (64 - count)
        assert int((labels != -100).sum()) <= max(1, round(0.15 * count))
        assert int(item["is_random"]) == is_random
        assert not ((labels == CLS) | (labels == SEP)).any()


def test_samples_depend_on_the_seed_and_their_number_alone(
    corpus: Callable[[Sequence[Sequence[int]]], IndexedDataset], tmp_path: Path
) -> None:
    data = corpus(random_documents(50))
    options = {"vocabulary": WORDS, "seq_length": 48, "num_samples": 100}
    first = BertDataset(data, **options, seed=3)  # type: ignore[arg-type]
    again = BertDataset(data, **options, seed=3, cache_dir=tmp_path / "other")  # type: ignore[arg-type]
    sent = pickle.loads(pickle.dumps(first))
    other = BertDataset(data, **options, seed=4)  # type: ignore[arg-type]
    items = [first[number] for number in range(100)]
    for number in reversed(range(100)):
        for twin in (again, sent):
            assert all(torch.equal(value, items[number][name]) for name, value in twin[number].items())
    assert any(not torch.equal(other[number]["tokens"], items[number]["tokens"]) for number in range(10))
    assert torch.equal(first[-1]["tokens"], items[99]["tokens"])
    with pytest.raises(IndexError, match="100 train samples"):
        _ = first[100]
    padding = first[None]
    assert (padding["labels"] == -100).all()
    assert int(padding["is_random"]) == -100


def test_fifteen_percent_are_masked_in_three_ways() -> None:
    rng, rule = RandomState(0), MaskingRule(whole_words=False)
    chosen = masked = kept = length = 0
    for _ in range(400):
        text = np.concatenate(([CLS], rng.randint(10, SIZE, 200), [SEP]))
        seen, positions = mask_tokens(text, WORDS, rule, rng, len(text))
        rest = np.setdiff1d(np.arange(len(text)), positions)
        assert (seen[rest] == text[rest]).all()
        assert len(positions) == round(0.15 * len(text))
        assert len(set(positions.tolist())) == len(positions)
        chosen, length = chosen + len(positions), length + len(text)
        masked += int((seen[positions] == MASK).sum())
        kept += int((seen[positions] == text[positions]).sum())
    assert near(masked, chosen, 0.8 + 0.1 / SIZE)
    assert near(kept, chosen, 0.1 + 0.1 / SIZE)


def test_a_drawn_token_has_a_piece(tmp_path: Path) -> None:
    """Of a piece that stands twice in a vocabulary the later line counts, and the first has no piece."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *["word"] * 90, "other"]
    (tmp_path / "vocab.txt").write_text("\n".join(names) + "\n")
    tokenizer = build_tokenizer("BertWordPieceCase", tmp_path)
    assert isinstance(tokenizer, BertWordPieceTokenizer)
    vocabulary = Vocabulary.of(tokenizer)
    tokens = np.array([2, *tokenizer.encode("word other " * 2000), 3])
    seen, _ = mask_tokens(tokens, vocabulary, MaskingRule(), RandomState(0), len(tokens))
    assert set(seen.tolist()) <= {0, 1, 2, 3, 4, 94, 95}
    assert {0, 1} & set(seen.tolist())


def test_runs_of_n_words_have_a_weight_of_one_over_n() -> None:
    words, lengths = [[position] for position in range(4000)], Counter[int]()
    for seed in range(60):
        runs = list(choose_runs(words, 100, MaskingRule(), RandomState(seed)))
        assert sum(map(len, runs)) == 100
        lengths.update(map(len, runs))
    total = sum(lengths.values())
    assert {n: count / total for n, count in lengths.items()} == pytest.approx(
        {1: 6 / 11, 2: 3 / 11, 3: 2 / 11}, abs=0.03
    )
    assert {len(run) for run in choose_runs(words, 100, MaskingRule(max_ngram=1), RandomState(0))} == {1}


def test_a_word_is_masked_whole_or_not_at_all() -> None:
    rng = RandomState(2)
    for _ in range(200):
        text = np.concatenate(([CLS], rng.randint(10, SIZE, 40), [SEP], rng.randint(10, SIZE, 30), [SEP]))
        words = words_of(text, WORDS, whole=True)
        assert [p for word in words for p in word] == [p for p in range(len(text)) if text[p] not in (CLS, SEP)]
        assert all(WORDS.continues[text[word[1:]]].all() for word in words)
        _, positions = mask_tokens(text, WORDS, MaskingRule(), rng, len(text))
        taken = set(positions.tolist())
        assert all(taken.isdisjoint(word) or taken.issuperset(word) for word in words)
        assert len(taken) <= round(0.15 * len(text))


def test_the_least_and_the_most_that_can_be_masked() -> None:
    text = np.array([CLS, 10, SEP, 12, SEP])
    assert len(mask_tokens(text, WORDS, MaskingRule(), RandomState(0), 7)[1]) == 1
    assert len(mask_tokens(text, WORDS, MaskingRule(0.0), RandomState(0), 7)[1]) == 0
    assert len(mask_tokens(text, WORDS, MaskingRule(1.0, max_ngram=1), RandomState(0), 7)[1]) == 2
    assert not list(choose_runs([], 3, MaskingRule(), RandomState(0)))
    assert list(samples_of_document([3, 3], 4, repeat(2), 2)) == [(4, 6, 2)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seq_length": 4}, "seq_length=4.*special tokens"),
        ({"num_samples": -1}, "num_samples=-1"),
        ({"short_probability": 1.5}, "short_probability=1.5"),
    ],
)
def test_arguments_that_cannot_work_are_named(
    corpus: Callable[[Sequence[Sequence[int]]], IndexedDataset], change: dict[str, float], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        BertDataset(corpus([[5, 5]]), **{"vocabulary": WORDS, "seq_length": 32} | change)  # type: ignore[arg-type]
