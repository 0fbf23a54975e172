"""Measures of a decoder: perplexity of texts, bits per byte, and the share of words that are predicted correctly."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from lightning_megatron.lightning.modules.decoder import GPTModule
from lightning_megatron.tools.evaluation.corpora import Text
from lightning_megatron.tools.evaluation.ranks import Ranks
from lightning_megatron.tools.evaluation.steps import scores
from lightning_megatron.tools.evaluation.windows import Window, collate, groups, windows


@dataclass(frozen=True)
class Perplexity:
    """Loss of the tokens of some texts.

    Attributes:
        texts: number of texts.
        tokens: number of tokens that were predicted.
        loss_sum: sum of their losses, in nats.
        words: number of words that were predicted.
        num_bytes: bytes of the texts.
    """

    texts: int
    tokens: int
    loss_sum: float
    words: int
    num_bytes: int

    @property
    def loss(self) -> float:
        """Mean loss of a token."""
        return self.loss_sum / self.tokens

    @property
    def perplexity(self) -> float:
        """Exponential of the mean loss."""
        return _exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Loss in bits, divided by the bytes of the texts."""
        return self.loss_sum / math.log(2) / self.num_bytes

    @property
    def token_ratio(self) -> float:
        """Tokens per word."""
        return self.tokens / self.words if self.words else math.inf

    @property
    def word_perplexity(self) -> float:
        """Perplexity per word, comparable between tokenizers; Megatron-LM's adjusted perplexity."""
        return _exp(self.loss * self.token_ratio)


@dataclass(frozen=True)
class Cloze:
    """Predictions of the ends of passages.

    Attributes:
        passages: number of passages.
        correct: number of passages with every token of the end predicted as the likeliest.
        loss_sum: sum of the losses of the ends, in nats.
    """

    passages: int
    correct: int
    loss_sum: float

    @property
    def accuracy(self) -> float:
        """Share of passages that were predicted correctly."""
        return self.correct / self.passages

    @property
    def perplexity(self) -> float:
        """Exponential of the mean loss of an end."""
        return _exp(self.loss_sum / self.passages)


def perplexity(ranks: Ranks, texts: Iterable[Text], length: int, stride: int) -> Perplexity:
    """Perplexity of texts, each by itself, in windows.

    Args:
        ranks: the ranks; all of them call this with the same texts.
        texts: the texts.
        length: tokens that the model sees at once.
        stride: tokens by which windows of a text are shifted; below ``length``, tokens have more context.
    """
    counts = {"texts": 0, "words": 0, "num_bytes": 0}

    def cut() -> Iterator[Window]:
        for text in texts:
            counts["texts"] += 1
            counts["num_bytes"] += text.num_bytes
            counts["words"] += text.words
            yield from windows(text.tokens, length, stride)

    tokens, total = 0, 0.0
    for some in groups(cut(), ranks.rows * ranks.mesh.layout.pp):
        found = ranks.run(GPTModule.token_losses, collate(some, length))
        tokens += sum(window.asked for window in some)
        total += _sum(found["result"])
    return Perplexity(counts["texts"], tokens, total, counts["words"], counts["num_bytes"])


def cloze(ranks: Ranks, passages: Iterable[Text], length: int) -> Cloze:
    """Predict the ends of passages; a passage that is longer than ``length`` loses its beginning.

    Args:
        ranks: the ranks; all of them call this with the same passages.
        passages: passages whose ends are to be predicted.
        length: tokens that the model sees at once.
    """
    count, correct, total = 0, 0, 0.0
    ends = (Window(text.tokens[-length - 1 :], text.asked or 1) for text in passages)
    for some in groups(ends, ranks.rows * ranks.mesh.layout.pp):
        found = ranks.run(scores, collate(some, length))
        count += len(some)
        correct += int(found["likeliest"].all(dim=1).sum())
        total += _sum(found["losses"])
    return Cloze(count, correct, total)


def _sum(loss: Tensor) -> float:
    return float(loss.double().sum())


def _exp(value: float) -> float:
    return math.exp(value) if value < math.log(1.7e308) else math.inf
