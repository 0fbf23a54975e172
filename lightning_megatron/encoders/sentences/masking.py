"""Choice of the tokens that a model must predict, and of the tokens it sees instead (https://arxiv.org/abs/1810.04805).

Words are drawn in runs of one to ``max_ngram``, shorter runs more often, until 15 % of the tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from lightning_megatron.data.tokenizers import BertWordPieceTokenizer
from lightning_megatron.errors import ConfigError, Problem

_MASKED, _KEPT_OF_REST = 0.8, 0.5


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Tokens that samples are made with.

    Attributes:
        ids: ``[n]`` ids that have a token; there may be gaps.
        cls: token that begins a sample.
        sep: token that ends a segment.
        mask: token that replaces a token to predict.
        pad: padding.
        continues: ``[largest id + 1]``, True for pieces that continue a word.
    """

    ids: NDArray[np.int64]
    cls: int
    sep: int
    mask: int
    pad: int
    continues: NDArray[np.bool_]

    @classmethod
    def of(cls, tokenizer: BertWordPieceTokenizer) -> Vocabulary:
        """The vocabulary of a tokenizer.

        Raises:
            ConfigError: if it has no [MASK].
        """
        if tokenizer.mask is None:
            raise ConfigError([Problem("vocab_file", "no [MASK]", "tokens to guess are replaced by it")])
        continues = np.zeros(tokenizer.vocab_size, bool)
        continues[[number for piece, number in tokenizer.pieces.items() if piece.startswith("##")]] = True
        first, end, pad = (tokenizer.pieces[name] for name in ("[CLS]", "[SEP]", "[PAD]"))
        return cls(np.array(sorted(tokenizer.pieces.values())), first, end, tokenizer.mask, pad, continues)


@dataclass(frozen=True)
class MaskingRule:
    """Rule of the choice.

    Attributes:
        probability: share of the tokens to predict, at most this share of the sample's target length.
        max_ngram: longest run of words.
        whole_words: True to choose all pieces of a word, or none.
        geometric: chance of each word to be the last of its run; 0 for runs of ``n`` words with a weight of ``1/n``.
    """

    probability: float = 0.15
    max_ngram: int = 3
    whole_words: bool = True
    geometric: float = 0.0

    def budget(self, length: int, target: int) -> float:
        """Most tokens to choose among ``length``, in a sample of target length ``target``; below 1 for none."""
        return min(self.probability * target, max(1, round(self.probability * length)))

    def draw_length(self, rng: RandomState) -> int:
        """Number of words of a run, if that many are left."""
        if self.geometric:
            return min(int(rng.geometric(self.geometric)), self.max_ngram)
        shares = np.cumsum(1.0 / np.arange(1, self.max_ngram + 1))
        return 1 + int(np.searchsorted(shares / shares[-1], rng.random_sample(), side="right"))


def words_of(tokens: NDArray[np.int64], vocabulary: Vocabulary, *, whole: bool) -> list[list[int]]:
    """Positions of the tokens of each word, special tokens left out; every token is a word unless ``whole``.

    If truncation has left a continuing piece at the start of the second segment, it counts to the word before.
    """
    special = (tokens == vocabulary.cls) | (tokens == vocabulary.sep)
    return grouped(np.flatnonzero(~special).tolist(), vocabulary.continues[tokens] & whole)


def grouped(positions: list[int], goes_on: NDArray[np.bool_]) -> list[list[int]]:
    """Positions of each word; ``goes_on`` is True for tokens that continue one."""
    words: list[list[int]] = []
    for position in positions:
        if words and goes_on[position]:
            words[-1].append(position)
        else:
            words.append([position])
    return words


def choose_runs(
    words: list[list[int]], budget: float, rule: MaskingRule, rng: RandomState, most: int | None = None
) -> Iterator[list[int]]:
    """Runs of words, as positions of tokens, of together at most ``budget`` tokens, in the order of the choice.

    Each word, in random order, proposes a run that begins with it. A run that would exceed the budget is made shorter;
    one that meets a chosen word is left out. Between two runs the caller may draw from the stream, as Megatron-LM does.

    Args:
        words: positions of the tokens of each word.
        budget: number of tokens to choose.
        most: maximum number of runs; ``None`` for any.
    """
    taken: set[int] = set()
    chosen = 0
    for start in rng.permutation(len(words)).tolist():
        if len(taken) >= budget or chosen == most:
            break
        for size in range(rule.draw_length(rng), 0, -1):
            run = [position for word in words[start : start + size] for position in word]
            if len(taken) + len(run) <= budget:
                if taken.isdisjoint(run):
                    chosen += 1
                    taken.update(run)
                    yield run
                break


def mask_tokens(
    tokens: NDArray[np.int64], vocabulary: Vocabulary, rule: MaskingRule, rng: RandomState, target: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens as the model sees them, and the positions to guess, in order.

    Of the chosen tokens 80 % become the mask, 10 % any token of the vocabulary, and 10 % stay.

    Args:
        tokens: a sample with its special tokens, without padding.
        vocabulary: tokens that samples are made with.
        target: target length of the sample.
    """
    seen, positions = tokens.copy(), []
    words = words_of(tokens, vocabulary, whole=rule.whole_words)
    for run in choose_runs(words, rule.budget(len(tokens), target), rule, rng):
        positions += run
        for position in run:
            if rng.random_sample() < _MASKED:
                seen[position] = vocabulary.mask
            elif rng.random_sample() >= _KEPT_OF_REST:
                seen[position] = vocabulary.ids[rng.randint(0, len(vocabulary.ids))]
    return seen, np.array(sorted(positions), np.int64)
