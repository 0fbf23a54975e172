"""Text for a first try without a network: sentences of a small grammar, with words of decreasing frequency."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from lightning_megatron.files.growing import written_at_once

_SYLLABLES = tuple(a + b for a in ("b", "d", "f", "k", "l", "m", "n", "p", "r", "s", "t", "v") for b in "aeiou")
_NOUNS, _VERBS, _ADJECTIVES = 600, 200, 150
_SHAPES = ("the {a} {n} {v} the {n}", "a {n} {v}", "the {n} of the {n} {v} a {a} {n}", "when the {n} {v}, a {n} {v}")


class DemoText:
    """Documents in an artificial language: one seed gives the same text on every machine.

    Args:
        seed: seed of words and sentences.
    """

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._words = {
            kind: tuple(self._word(endings) for _ in range(count))
            for kind, count, endings in (
                ("n", _NOUNS, ("", "n", "m")),
                ("v", _VERBS, ("t", "s")),
                ("a", _ADJECTIVES, ("l",)),
            )
        }
        self._shares = {kind: [1 / (rank + 2) for rank in range(len(words))] for kind, words in self._words.items()}

    def documents(self, count: int) -> Iterator[str]:
        """Texts of a few paragraphs each."""
        for _ in range(count):
            paragraphs = (self._paragraph() for _ in range(self._random.randint(1, 4)))
            yield "\n\n".join(paragraphs)

    def _word(self, endings: tuple[str, ...]) -> str:
        syllables = (self._random.choice(_SYLLABLES) for _ in range(self._random.randint(1, 3)))
        return "".join(syllables) + self._random.choice(endings)

    def _paragraph(self) -> str:
        return " ".join(self._sentence() for _ in range(self._random.randint(3, 9)))

    def _sentence(self) -> str:
        shape = self._random.choice(_SHAPES)
        words = [self._drawn(part) for part in shape.split(" ")]
        text = " ".join(words)
        return f"{text[0].upper()}{text[1:]}."

    def _drawn(self, part: str) -> str:
        if not part.startswith("{"):
            return part
        kind = part[1]
        (word,) = self._random.choices(self._words[kind], self._shares[kind])
        return word + part[3:]


def write_demo_text(path: Path, documents: int, seed: int) -> None:
    """Write documents as JSON lines, in one step."""
    with written_at_once(path) as stream:
        for text in DemoText(seed).documents(documents):
            stream.write(json.dumps({"text": text}).encode() + b"\n")
