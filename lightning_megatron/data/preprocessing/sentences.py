"""Split of a text into sentences, by rules."""

from __future__ import annotations

import re

_BOUNDARY = re.compile(
    r"""(?P<end>[.!?\u2026]+["'\u201d\u2019)\]]*)   # the stop, with what closes after it
        (?P<space>\s+)
        (?=["'\u201c\u2018(\[]*[^\W_a-z])      # then a capital, a digit, or a letter without case""",
    re.VERBOSE,
)
_PARAGRAPH = re.compile(r"(?P<end>)(?P<space>\n\s*\n\s*)")
# Chinese and Japanese: the full-width stop, and no space after it.
_FULL_WIDTH = re.compile(r"(?P<end>[\u3002\uff01\uff1f]+[\u300d\u300f\u201d\u2019\uff09]*)(?P<space>\s*)")
_LAST_WORD = re.compile(r"(\S+)$")

_ABBREVIATIONS = frozenset(
    (
        *("mr", "mrs", "ms", "dr", "prof", "rev", "hon", "st", "sr", "jr", "gen", "col", "lt", "sgt", "capt", "gov"),
        *("sen", "rep", "pres", "vs", "cf", "eg", "ie", "e.g", "i.e", "al", "approx", "vol", "fig", "figs", "eq"),
        *("pp", "ed", "eds", "jan", "feb", "mar", "apr", "jun", "jul", "aug", "sep", "sept", "oct", "nov", "dec"),
        *("inc", "ltd", "co", "corp", "dept", "u.s", "u.k", "a.m", "p.m"),
    )
)


def split_sentences(text: str, *, keep_newlines: bool = False) -> list[str]:
    """Cut a text after its full stops, question and exclamation marks, and at blank lines.

    A stop ends no sentence after a known abbreviation or a single capital letter ("J. Smith"), nor before a lower-case
    letter. Good enough to make BERT's sentence pairs; for other rules, split beforehand and give one sentence a line.

    Args:
        text: any text.
        keep_newlines: leave the line breaks between sentences at the end of the first; else the space between
            sentences is dropped.

    Returns:
        The sentences, none of them blank.
    """
    matches = [m for pattern in (_BOUNDARY, _PARAGRAPH, _FULL_WIDTH) for m in pattern.finditer(text)]
    sentences: list[str] = []
    start = 0
    for match in sorted(matches, key=lambda m: m.start()):
        if match.start() < start or (match.re is _BOUNDARY and _is_abbreviation(text[start : match.start("space")])):
            continue
        sentences.append(text[start : match.end() if keep_newlines else match.end("end")])
        start = match.end()
    sentences.append(text[start:])
    if keep_newlines:
        return [s.strip(" \t") for s in sentences if s.strip()]
    return [s.strip() for s in sentences if s.strip()]


def _is_abbreviation(sentence: str) -> bool:
    found = _LAST_WORD.search(sentence)
    if found is None or not found[1].endswith("."):
        return False
    word = found[1].lstrip("\"'\u201c\u2018([").rstrip(".")
    return (len(word) == 1 and word.isupper()) or word.lower() in _ABBREVIATIONS
