"""Prepares a checkout for a package registry: addresses of the repository, and links that lead there from the README.

The address stands nowhere in the tree, since a fork has another one; the workflow ``release`` gives its own.

Run: ``python docs/published.py https://HOST/OWNER/NAME v0.1.0``, which edits setup.cfg and README.md in place.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def addresses(home: str, tag: str) -> str:
    """The entry ``project_urls`` of setup.cfg."""
    pages = {
        "Source": home,
        "Documentation": f"{home}/blob/{tag}/docs/README.md",
        "Changelog": f"{home}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{home}/issues",
    }
    return "project_urls =\n" + "".join(f"    {name} = {page}\n" for name, page in pages.items())


def with_whole_links(text: str, home: str, tag: str) -> str:
    """A page of the repository's root with links that lead to the tagged files; others stay."""
    return re.sub(r"\]\((?!https?:|#)([^)]+)\)", rf"]({home}/blob/{tag}/\1)", text)


def main(home: str, tag: str) -> None:
    """Edit both files."""
    settings, readme = ROOT / "setup.cfg", ROOT / "README.md"
    settings.write_text(settings.read_text().replace("classifiers =", f"{addresses(home, tag)}classifiers =", 1))
    readme.write_text(with_whole_links(readme.read_text(), home, tag))


if __name__ == "__main__":
    main(*sys.argv[1:])
