"""Sentinels, special tokens and continued words of the tokenizers that T5's samples can be made with."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from lightning_megatron.data.tokenizers import (
    BertWordPieceTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
)
from lightning_megatron.encoders.t5.dataset import SpanVocabulary
from lightning_megatron.errors import ConfigError, Problem

TOKENIZERS = ("HuggingFaceTokenizer", "GPTSentencePieceTokenizer", "BertWordPieceLowerCase", "BertWordPieceCase")
_SENTINEL = re.compile(r"<extra_id_(\d+)>")
_SPECIAL = re.compile(r"<.*>|\[.*\]")
_BEGINS_A_WORD = ("\u2581", "\u0120")  # of sentencepiece, and of byte-level BPE


def span_vocabulary(tokenizer: Tokenizer, extra_ids: int) -> SpanVocabulary:
    """The vocabulary of a tokenizer, with sentinels.

    A vocabulary that has no ``<extra_id_0>`` gets them behind its last token: BERT's as in Megatron-LM, after ``[BOS]``
    and ``[EOS]`` and counting up, sentencepiece's as in transformers, counting down. There the decoder begins with the
    token for padding.

    Args:
        tokenizer: tokenizer that the data was made with.
        extra_ids: number of sentinels to add.

    Raises:
        ConfigError: if it has no token for padding or for the end, or no sentinels and none can be added.
    """
    if isinstance(tokenizer, BertWordPieceTokenizer):
        return _of_word_pieces(tokenizer, extra_ids)
    if not isinstance(tokenizer, SentencePieceTokenizer | HuggingFaceTokenizer):
        raise ConfigError([Problem("tokenizer_type", type(tokenizer).__name__, "has no words", TOKENIZERS)])
    pieces = tokenizer.vocabulary()
    missing = [name for name in ("pad", "eos") if getattr(tokenizer, name) is None]
    if missing:
        reason = f"has no token for {' and '.join(missing)}, which begin and end what the decoder reads and writes"
        raise ConfigError([Problem("tokenizer_model", type(tokenizer).__name__, reason)])
    sentinels = _own_sentinels(pieces)
    size = tokenizer.vocab_size
    if not sentinels and isinstance(tokenizer, SentencePieceTokenizer):
        sentinels, size = tuple(range(size + extra_ids - 1, size - 1, -1)), size + extra_ids
    if not sentinels:
        reason = "has no <extra_id_0>, <extra_id_1>, ...: add them to the tokenizer as special tokens"
        raise ConfigError([Problem("tokenizer_model", type(tokenizer).__name__, reason)])
    assert tokenizer.pad is not None
    assert tokenizer.eos is not None
    continues = np.zeros(size, bool)
    inside = (i for name, i in pieces.items() if not name.startswith(_BEGINS_A_WORD) and not _SPECIAL.fullmatch(name))
    continues[list(inside)] = True
    return SpanVocabulary(sentinels, tokenizer.pad, tokenizer.eos, tokenizer.pad, continues)


def _own_sentinels(pieces: Mapping[str, int]) -> tuple[int, ...]:
    """Ids of the sentinels of a vocabulary, by their numbers."""
    found = {int(match[1]): i for name, i in pieces.items() if (match := _SENTINEL.fullmatch(name))}
    return tuple(found[number] for number in sorted(found))


def _of_word_pieces(tokenizer: BertWordPieceTokenizer, extra_ids: int) -> SpanVocabulary:
    pieces, size = dict(tokenizer.pieces), tokenizer.vocab_size
    for name in ("[BOS]", "[EOS]", *(f"<extra_id_{number}>" for number in range(extra_ids))):
        if name not in pieces:
            pieces[name], size = size, size + 1
    continues = np.zeros(size, bool)
    continues[[i for name, i in pieces.items() if name.startswith("##")]] = True
    return SpanVocabulary(_own_sentinels(pieces), pieces["[BOS]"], pieces["[EOS]"], pieces["[PAD]"], continues)
