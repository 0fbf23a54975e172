"""Files to evaluate on: documents of JSON lines, whole texts, WikiText, and LAMBADA's passages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning_megatron.data.preprocessing.textfiles import LONGEST_LINE, BrokenLineError, read_lines, text_of
from lightning_megatron.data.tokenizers import Tokenizer
from lightning_megatron.errors import DataError
from lightning_megatron.tools.evaluation.wikitext import without_spacing

Format = Literal["documents", "text", "wikitext", "lambada"]
FORMATS: tuple[Format, ...] = ("documents", "text", "wikitext", "lambada")


@dataclass(frozen=True)
class Text:
    """A text to predict.

    Attributes:
        tokens: its tokens.
        asked: number of tokens at its end that are to be predicted; ``None`` for all that have one before them.
        words: number of words to predict: all but the first, unless a begin token precedes it.
        num_bytes: length in bytes as UTF-8.
    """

    tokens: list[int]
    asked: int | None
    words: int
    num_bytes: int


@dataclass(frozen=True)
class Reader:
    """Reader of files of one format.

    Attributes:
        format: ``"documents"``: JSON lines, each a document; ``"text"``: the file as it is; ``"wikitext"``: the same,
            with the spacing of words undone; ``"lambada"``: JSON lines whose last word is to be predicted.
        key: key of the text in JSON lines.
        begins: True to put a begin token before each text, so that its first token is predicted too.
        strict: True to predict all tokens of LAMBADA's last word; else only the last token.
        longest_line: maximum number of bytes in a line.
    """

    format: Format = "documents"
    key: str = "text"
    begins: bool = False
    strict: bool = False
    longest_line: int = LONGEST_LINE

    def check(self, path: Path) -> None:
        """Check a file without a tokenizer.

        Raises:
            DataError: naming file and line of the first fault, also of a file without texts.
        """
        if not any([True for _ in self._texts(path)]):
            raise DataError.at(path, "there is no text in it", do="check --input")

    def read(self, path: Path, tokenizer: Tokenizer, vocab_size: int) -> Iterator[Text]:
        """The texts of a file, for a model that knows ``vocab_size`` tokens.

        Raises:
            DataError: naming file and line of a fault, also of a token that the model does not know.
        """
        encoding = Encoding(tokenizer)
        for line, text in self._texts(path):
            found = self._text(encoding, text)
            if (largest := max(found.tokens, default=0)) >= vocab_size:
                fault = f"the tokenizer makes token {largest} of it, and the model knows {vocab_size}"
                raise DataError.at(path, fault, line=line, do="give the tokenizer that the model was trained with")
            yield found

    def _texts(self, path: Path) -> Iterator[tuple[int | None, str]]:
        if self.format in ("text", "wikitext"):
            if text := _whole(path):
                yield None, text
            return
        for number, line in read_lines(path, self.longest_line):
            try:
                text = text_of(line, (self.key,))[self.key]
            except BrokenLineError as error:
                raise DataError.at(path, error.fault, line=number, do=error.do) from None
            if self.format == "lambada" and len(text.split()) < 2:
                fault = "a passage of less than two words"
                raise DataError.at(path, fault, line=number, do="repair or remove the line")
            yield number, text

    def _text(self, encoding: Encoding, text: str) -> Text:
        # Megatron-LM's count of WikiText's words, which are separated by single blanks and line breaks.
        words = len(text.strip().split(" ") if self.format == "wikitext" else text.split())
        words -= not self.begins
        size = len(text.encode())
        if self.format == "lambada":
            tokens, asked = self._cloze(encoding, text)
            return Text(tokens, asked, words, size)
        tokens = encoding.whole(without_spacing(text) if self.format == "wikitext" else text)
        return Text(encoding.begun(tokens) if self.begins else tokens, None, max(words, 0), size)

    def _cloze(self, encoding: Encoding, text: str) -> tuple[list[int], int]:
        """Tokens of a passage, and the number of those at its end to predict."""
        if not self.strict:
            return encoding.whole(text), 1
        word = text.split()[-1]
        before = text[: text.rfind(word)].strip()
        last = encoding.inside(f" {word}")
        tokens = encoding.whole(before) + last
        return tokens, min(len(last), len(tokens) - 1)


class Encoding:
    """A tokenizer, with and without the special tokens that it puts around a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        empty = tokenizer.encode("")
        self._before = 1 if empty and empty[0] == tokenizer.bos else 0
        self._after = len(empty) - self._before

    @property
    def begin(self) -> int | None:
        """Token before the first one: the begin token, or else the one that ends documents; ``None`` without either."""
        return self._tokenizer.eod if self._tokenizer.bos is None else self._tokenizer.bos

    def whole(self, text: str) -> list[int]:
        """Tokens of a text, and the special token that the tokenizer puts before it."""
        ids = self._tokenizer.encode(text)
        return ids[: len(ids) - self._after]

    def inside(self, text: str) -> list[int]:
        """Tokens of a text, without special tokens."""
        return self.whole(text)[self._before :]

    def begun(self, tokens: list[int]) -> list[int]:
        """Tokens with a begin token before them, added if there is none.

        Raises:
            DataError: if the tokenizer has no such token.
        """
        if tokens and tokens[0] == self._tokenizer.bos:
            return tokens
        if self.begin is None:
            raise DataError("the tokenizer has no token to begin a text with: leave --begin out")
        return [self.begin, *tokens]


def _whole(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise DataError.at(path, f"not UTF-8 ({error})", do="give a plain text, or --format documents") from None
