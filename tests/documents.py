"""Code blocks of the documents, for tests that run them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Args:
        page: path from the root.
        line: line of its fence in the page.
        language: after the fence.
        text: between the fences.
    """

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> list[list[str]]:
        """Words of each command of a shell block, comments and continued lines understood."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def blocks(language: str) -> list[Block]:
    """All blocks in that language, page by page."""
    return [block for page in PAGES for block in blocks_of(page) if block.language == language]


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page."""
    text = page.read_text()
    name = str(page.relative_to(ROOT))
    return [Block(name, text.count("\n", 0, m.start()) + 1, m[2], m[3]) for m in _BLOCK.finditer(text)]
