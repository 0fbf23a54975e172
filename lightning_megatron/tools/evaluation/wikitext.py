"""Undo the spacing of WikiText, whose files separate words and punctuation by blanks, unlike texts of training."""

from __future__ import annotations

import re

_CLOSERS = tuple(f" {sign} " for sign in ":;.!?,")
# Replacements come before pairs are closed, in Megatron-LM's order, since its results are for the text that this gives.
_FIRST = {"s '": "s'", " @-@ ": "-", " @,@ ": ",", " @.@ ": ".", **{sign: sign[1:] for sign in _CLOSERS}}
_PAIRS = (("(", ")"), ("[", "]"), ("{", "}"), ('"', '"'), ("'", "'"))
_LAST = {
    "= = = =": "====",
    "= = =": "===",
    "= =": "==",
    " \N{DEGREE SIGN} ": "\N{DEGREE SIGN}",
    " \n": "\n",
    "\n ": "\n",
    " N ": " 1 ",
    " 's": "'s",
}


def without_spacing(text: str) -> str:
    """A text of WikiText as it was before it was split into words; what Megatron-LM evaluates."""
    text = _exchanged(text, _FIRST)
    for opening, closing in _PAIRS:
        inside = rf"{re.escape(opening)}\s*([^{re.escape(closing)}]*?)\s*{re.escape(closing)}"
        text = re.sub(inside, rf"{opening}\1{closing}", text)
    return _exchanged(text, _LAST)


def _exchanged(text: str, pairs: dict[str, str]) -> str:
    for old, new in pairs.items():
        text = text.replace(old, new)
    return text
