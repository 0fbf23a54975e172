"""Tokens of texts as the bytes of a token file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lightning_megatron.data.preprocessing.word_cuts import WordCuts
from lightning_megatron.data.tokenizers import FastTokenizer, Tokenizer

_MOST_WORDS, _MOST_PIECES = 1 << 17, 1 << 18
_LONGEST_WORD = 64
_CHARACTERS = {byte: 256 + byte for byte in range(33)} | {127: 289}
"""Characters that stand for the non-printable ASCII bytes in byte-level models (GPT-2's table)."""
_PROBES = (
    "",
    " ",
    "a",
    " a",
    "a ",
    "one  two   three\n\n four \n five\n\n\nsix\tseven \t eight\r\nnine  \r\n",
    "It's THEY'LL we'Ve 'd i'm can't ''s O'Neil 'S  'll x's'd",
    "1 12 123 1234 12345,678.90 3rd v2.0.1 0x1F 1e-5 a1b2 1a",
    "f(x) = {a[0]: 'b', **c}; # !? ... --- /* */ <tag attr=\"v\"/> a.b.c http://x.y/?z=1&w=%20 #\n!\n\n?\r\n",
    "na\u00efve caf\u00e9 \u00dcber \u6f22\u5b57 \u304b\u306a \u2014 \u201cquoted\u201d \U0001f600",
    "e\u0301 x\u00a0y \u3000z",
    "\x00 \x01a \x0b b\x0c c\x1c d\x1f e\x7f f\x85 g\u200b h\u2028i",
    "\u0130stanbul \u0660\u0661 \u00bd \u017f's '\u017f \u1e9e",
)


class TokenBytes:
    """Converter of texts to the bytes of a token file: exactly the tokenizer's tokens, but faster.

    Args:
        tokenizer: tokenizer.
        dtype: type of a token.
        source: words that name the tokenizer in errors.
        cuts: places where its texts can be cut; ``None`` if none are known.
    """

    def __init__(self, tokenizer: Tokenizer, dtype: np.dtype[Any], source: str, cuts: WordCuts | None) -> None:
        self._tokenizer, self._dtype, self._source = tokenizer, dtype, source
        self._limit = int(np.iinfo(dtype).max)
        self._cuts = cuts
        self._words = _Remembered(self._word, _MOST_WORDS)
        by_model = cuts is not None and cuts.byte_level and isinstance(tokenizer, FastTokenizer)
        self._pieces = _Remembered(self._modelled if by_model else self._plain, _MOST_PIECES)
        self._before, self._after = self._around()
        if self._cuts is not None and any(self.of(text) != self._asked(text) for text in _probes(cuts)):
            self._cuts = None

    def of(self, text: str) -> bytes:
        """Tokens of a text.

        Raises:
            DataError: if the text is refused.
            OverflowError: if a token does not fit the type of the file, so that the tokenizer's vocabulary is wrong.
        """
        if self._cuts is None or not text:
            return self._asked(text)
        pieces = self._cuts.pieces_of(text)
        if pieces is not None:
            return self._before + b"".join(map(self._pieces.__getitem__, pieces)) + self._after
        return self._before + b"".join(map(self._words.__getitem__, self._cuts.parts(text))) + self._after

    def _asked(self, text: str) -> bytes:
        return self._packed(self._tokenizer.encode(text))

    def _plain(self, text: str) -> bytes:
        """Tokens of a piece, without those that begin and end every text."""
        whole = self._asked(text)
        return whole[len(self._before) : len(whole) - len(self._after)]

    def _modelled(self, piece: str) -> bytes:
        """Tokens of an ASCII piece, from the model alone: normalizer and pre-tokenizer would not change it."""
        assert isinstance(self._tokenizer, FastTokenizer)
        return self._packed(self._tokenizer.encode_piece(piece.translate(_CHARACTERS)))

    def _word(self, word: str) -> bytes:
        pieces = None if self._cuts is None else self._cuts.pieces_of(word)
        return self._plain(word) if pieces is None else b"".join(map(self._pieces.__getitem__, pieces))

    def _packed(self, ids: Sequence[int]) -> bytes:
        if ids and max(ids) > self._limit:
            fault = f"{self._source} gives the id {max(ids)}, and its vocabulary of {self._tokenizer.vocab_size} tokens"
            raise OverflowError(f"{fault} is stored in {self._dtype.name}, which ends at {self._limit}")
        return np.array(ids, self._dtype).tobytes()

    def _around(self) -> tuple[bytes, bytes]:
        """Tokens that the tokenizer puts before and after every text."""
        if self._cuts is None:
            return b"", b""
        one, two, both = (list(self._tokenizer.encode(text)) for text in ("a", "b", ""))
        first = next((i for i, (x, y) in enumerate(zip(one, two, strict=False)) if x != y), 0)
        if both != one[:first] + one[first + 1 :]:  # the rest must be the same around any text
            self._cuts = None
        return self._packed(one[:first]), self._packed(one[first + 1 :])


class _Remembered(dict[str, bytes]):
    """Cache of tokens by word; when it is full, it drops words that have not been used for long.

    Args:
        make: function that makes tokens.
        most: maximum number of words, half of them in the older generation.
    """

    def __init__(self, make: Callable[[str], bytes], most: int) -> None:
        super().__init__()
        self._make, self._young = make, most // 2
        self._older: dict[str, bytes] = {}

    def __missing__(self, word: str) -> bytes:
        if len(word) > _LONGEST_WORD:
            return self._make(word)
        found = self._older.get(word)
        if found is None:
            found = self._make(word)
        if len(self) >= self._young:
            self._older = dict(self)
            self.clear()
        self[word] = found
        return found


def _probes(cuts: WordCuts | None) -> Sequence[str]:
    """Texts that test if a tokenizer behaves as its description says."""
    added = () if cuts is None else cuts.added[:3]
    return (*_PROBES, " ".join(_PROBES), *(f"x {token}y {token} z{token}\n{token}" for token in added))
