"""Places where a text can be cut so that the tokens of its parts, joined, are the tokens of the whole.

Most words of a corpus are the same few thousand, so caching their tokens is several times as fast as calling the
tokenizer for each. That is right only if a tokenizer encodes the parts independently, which is known here for those
that split a text by one of a few published rules. For any other tokenizer there are no cuts.

A text of ASCII characters is split by the rule itself. Which other characters are letters depends on the version of
Unicode that a tokenizer was built with, so words with such characters are left whole, for the tokenizer to split. So
are words with added tokens. A tokenizer looks for some of these in the normalized text: no cut is known then, unless
they are of ASCII characters, which the known normalizers leave as they are but for their case.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_SPACE = "\t\n\x0b\x0c\r "
_BERT = re.compile(r"[A-Za-z0-9]+|[^\sA-Za-z0-9]")
_NORMALIZERS = (None, "NFC", "NFD")
_CUT = re.compile(r"(?<=[^\s\x1c-\x1f])(?= [^\s\x1c-\x1f])")
_OTHER_THAN_ASCII, _OTHER_THAN_PRINTABLE = r"[^\x00-\x7f]+", r"[^\t\n\r\x20-\x7e]+"
_FEW = 32  # least characters of a text per strange part in it; below that, most words are strange


def _of_ascii(rule: str) -> re.Pattern[str]:
    """The rule of a tokenizer for texts of ASCII characters."""
    inside = rule.replace(r"\s\p{L}\p{N}]", f"{_SPACE}A-Za-z0-9]").replace(r"\p{L}\p{N}]", "A-Za-z0-9]")
    return re.compile(
        inside.replace(r"\p{L}", "[A-Za-z]")
        .replace(r"\p{N}", "[0-9]")
        .replace(r"\s", f"[{_SPACE}]")
        .replace(r"\S", f"[^{_SPACE}]")
    )


_RULES: Mapping[str, re.Pattern[str]] = {rule: _of_ascii(rule) for rule in (_GPT2, _LLAMA3, _QWEN2)}


@dataclass(frozen=True)
class WordCuts:
    """The cuts of one tokenizer.

    A text of plain characters is cut into the pieces of the rule. Any other one is cut before some of its single spaces
    between two other characters, because the rules begin a new piece there.

    Attributes:
        pieces: rule for texts of plain characters.
        added: added tokens, which the tokenizer matches in the text, or in the normalized text, before it applies the
            rules.
        strange: rule for characters that are not plain.
        byte_level: true if the model reads the bytes of a piece, each written as one character.
        longest: most characters of plain text to split at once, if it has cuts; bounds memory.
    """

    pieces: re.Pattern[str]
    added: tuple[str, ...]
    strange: str
    byte_level: bool
    longest: int = 1 << 18

    @classmethod
    def of(cls, description: Mapping[str, Any]) -> WordCuts | None:
        """The cuts of a tokenizer by its ``tokenizer.json``, or ``None`` if none are known."""
        pieces = _pieces(description)
        added = description.get("added_tokens") or []
        has_normalizer = bool(description.get("normalizer"))
        if pieces is None or not all(_stands_alone(token, has_normalizer) for token in added):
            return None
        strange = _OTHER_THAN_PRINTABLE if pieces is _BERT else _OTHER_THAN_ASCII
        byte_level = pieces is not _BERT and _has_byte_level(description["pre_tokenizer"])
        return cls(pieces, tuple(token["content"] for token in added), strange, byte_level)

    def pieces_of(self, text: str) -> list[str] | None:
        """Parts into which the tokenizer's rules split a text; ``None`` if it is not all plain, or long."""
        strange = not text.isascii() or (self._may_be_strange(text) and self._strange.search(text))
        return None if strange or len(text) > self.longest else self.pieces.findall(text)

    def parts(self, text: str) -> list[str]:
        """Parts of any text: plain ones that are not long, and words with strange characters or added tokens."""
        if len(self._strange.findall(text)) * _FEW > len(text):
            return _CUT.split(text)
        return list(self._stretches(text))

    def _stretches(self, text: str) -> Iterator[str]:
        begin = 0
        for found in self._strange.finditer(text):
            if found.start() >= begin:
                start, stop = _cut_before(text, begin, found.start()), _cut_behind(text, found.end())
                yield from self._shorter(text[begin:start])
                yield text[start:stop]
                begin = stop
        yield from self._shorter(text[begin:])

    def _shorter(self, text: str) -> Iterator[str]:
        begin = 0
        while begin < len(text):
            stop = _cut_behind(text, begin + self.longest // 2)
            yield text[begin:stop]
            begin = stop

    @cached_property
    def _strange(self) -> re.Pattern[str]:
        folded = "(?i:{})" if self.strange == _OTHER_THAN_PRINTABLE else "{}"  # BERT's normalizer may fold case
        return re.compile("|".join([self.strange, *(folded.format(re.escape(token)) for token in self.added)]))

    @cached_property
    def _beginning(self) -> str:
        """The characters with which all added tokens begin."""
        first, last = min(self.added, default=""), max(self.added, default="")
        return first[: next((i for i, (x, y) in enumerate(zip(first, last, strict=False)) if x != y), len(first))]

    def _may_be_strange(self, text: str) -> bool:
        """Quick test of a text of ASCII characters: False means that all of it is plain."""
        return self.strange != _OTHER_THAN_ASCII or (bool(self.added) and self._beginning in text)


def _cut_before(text: str, first: int, place: int) -> int:
    """The last cut between two places, or the first of them."""
    while (space := text.rfind(" ", first + 1, place)) >= 0:
        if _CUT.match(text, space):
            return space
        place = space
    return first


def _cut_behind(text: str, place: int) -> int:
    """The first cut at or behind a place, or the end."""
    found = _CUT.search(text, place)
    return len(text) if found is None else found.start()


def _pieces(description: Mapping[str, Any]) -> re.Pattern[str] | None:
    """The rule of a tokenizer for ASCII, if that and all that comes before it are known."""
    model, before = description["model"], description.get("pre_tokenizer") or {}
    normalizer = description.get("normalizer") or {}
    if before.get("type") == "BertPreTokenizer":
        known = model.get("type") == "WordPiece" and normalizer.get("type") in (None, "BertNormalizer")
        return _BERT if known else None
    if model.get("type") != "BPE" or model.get("dropout") or normalizer.get("type") not in _NORMALIZERS:
        return None
    rules = list(_rules(before))
    return _RULES.get(rules[0]) if len(rules) == 1 else None


def _rules(before: Mapping[str, Any]) -> Iterable[str]:
    """Rules by which a pre-tokenizer splits; one that is unknown is empty."""
    kind = before.get("type")
    if kind == "Sequence":
        *first, last = before["pretokenizers"] or [{}]
        for part in first:
            yield from _rules(part) if part.get("type") != "ByteLevel" else [""]  # later rules would split bytes
        yield from _rules(last)
    elif kind == "Split":
        plain = before.get("behavior") == "Isolated" and not before.get("invert")
        yield before.get("pattern", {}).get("Regex", "") if plain else ""
    elif kind == "ByteLevel" and not before.get("add_prefix_space"):
        if before.get("use_regex", True):
            yield _GPT2
    else:
        yield ""


def _has_byte_level(before: Mapping[str, Any]) -> bool:
    """True if a known pre-tokenizer writes each byte as one character."""
    return any(part.get("type") == "ByteLevel" for part in before.get("pretokenizers", [before]))


def _stands_alone(token: Mapping[str, Any], has_normalizer: bool) -> bool:
    """True if an added token absorbs none of the text around it, and is found in a text where it can be read there."""
    content, flags = token["content"], ("single_word", "lstrip", "rstrip")
    if not content or any(c.isspace() for c in content) or any(token.get(flag) for flag in flags):
        return False
    is_printable = content.isascii() and content.isprintable()
    return is_printable or not (has_normalizer and token.get("normalized", True))
