"""Prepares a checkout for a package registry: addresses of the repository, and links that lead there from the README.

The address stands nowhere in the tree, since a fork has another one; the workflow ``release`` gives its own.

Run: ``python docs/published.py https://HOST/OWNER/NAME v0.1.0``, which edits setup.cfg and README.md in place. It edits
nothing where the changelog gives this version no date.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMAGES = (".gif", ".jpg", ".jpeg", ".png", ".svg", ".webp")
_RELEASED = re.compile(r"^## (\d[\w.]*) - \d{4}-\d\d-\d\d$", re.MULTILINE)
_BLOCK = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!\w+:|#)([^)\s]+)\)")


def releases(changelog: str) -> list[str]:
    """Versions that have a date in the text of the changelog; one without a date is not released."""
    return _RELEASED.findall(changelog)


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
    """A page of the repository's root with links that lead to the tagged files, and images that are read from there.

    Whole addresses, links within the page and code blocks stay.
    """

    def whole(link: re.Match[str]) -> str:
        kind = "raw" if link[1].lower().endswith(IMAGES) else "blob"
        return f"]({home}/{kind}/{tag}/{link[1]})"

    parts = _BLOCK.split(text)
    return "".join(part if _BLOCK.fullmatch(part) else _LINK.sub(whole, part) for part in parts)


def main(home: str, tag: str) -> None:
    """Edit both files."""
    version = tag.removeprefix("v")
    if version not in releases((ROOT / "CHANGELOG.md").read_text()):
        raise SystemExit(f"CHANGELOG.md has no heading `## {version} - YYYY-MM-DD`")
    settings, readme = ROOT / "setup.cfg", ROOT / "README.md"
    settings.write_text(settings.read_text().replace("classifiers =", f"{addresses(home, tag)}classifiers =", 1))
    readme.write_text(with_whole_links(readme.read_text(), home, tag))


if __name__ == "__main__":
    main(*sys.argv[1:])
