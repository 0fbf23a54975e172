"""What MkDocs is told beside mkdocs.yml: pages of the root, pages of the public names, and links that leave docs/.

The Markdown of docs/ is written for a repository's web page, and read there as it is. On the site files of the root are
pages too; other files outside of docs/ are shown by their path, or linked where ``repo_url`` says where they are.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from pathlib import Path
from runpy import run_path
from typing import Any

from markdown_it import MarkdownIt
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OF_THE_ROOT = {"README.md": "project.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages of the site that are made of files outside of docs/."""
REFERENCE = {"lightning_megatron": "lightning_megatron", "lightning_megatron.data": "data"}
"""Modules with a page of their own; the others share one."""
COUNTED = ("li", "table", "pre")
"""Tags of which a page must have as many on the site as on a repository's web page."""
_LINK = re.compile(r"(?<!\!)\[((?:[^][]|\[[^][]*\])*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
_CODE = re.compile(r"(^ *```.*?^ *```$|`[^`\n]*`)", re.MULTILINE | re.DOTALL)

log = get_plugin_logger("site")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not files of docs/."""
    for source, target in OF_THE_ROOT.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text()))
    for name, text in reference(public_names()).items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to where their targets are on the site."""
    place = source_of(page.file.src_uri)
    return relinked(markdown, place, page.file.src_uri, config.repo_url)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Compare the page with what a repository's web page makes of it: the two kinds of Markdown differ in lists."""
    if not page.file.src_uri.startswith("reference/"):
        wanted = counts(MarkdownIt("commonmark").enable("table").render(page.markdown or ""))
        found = counts(re.sub(r'<div class="toc">.*?</div>', "", html, flags=re.DOTALL))
        if wanted != found:
            log.warning(f"{page.file.src_uri}: {found} on the site, {wanted} on a repository's web page")
    return html


def public_names() -> dict[str, list[str]]:
    """Public names of each module, those of docs/api.md."""
    names: dict[str, list[str]] = run_path(str(ROOT / "docs" / "api.py"))["public_names"]()
    return names


def reference(names: dict[str, list[str]]) -> dict[str, str]:
    """Pages for mkdocstrings: one for each module of :data:`REFERENCE`, one for the rest."""
    pages = {REFERENCE[module]: _of_modules([(module, names[module])]) for module in REFERENCE}
    rest = [(module, found) for module, found in names.items() if module not in REFERENCE]
    return pages | {"others": _of_modules(rest, "Other modules")}


def _of_modules(modules: Iterable[tuple[str, list[str]]], title: str = "") -> str:
    modules = list(modules)
    head = f"# {title or f'`{modules[0][0]}`'}\n\n"
    return head + "\n".join(f"::: {module}.{name}\n" for module, found in modules for name in found)


def source_of(page: str) -> str:
    """Path from the root of the file that a page is made of."""
    return {target: source for source, target in OF_THE_ROOT.items()}.get(page, f"docs/{page}")


def relinked(markdown: str, place: str, page: str, repository: str | None) -> str:
    """The text of a page with links that lead from the site's page to the targets of the file's links.

    Args:
        markdown: the text.
        place: path of the file from the root.
        page: path of the page from the root of the site.
        repository: address of the repository's files; ``None`` for none.
    """

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
        there = OF_THE_ROOT.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if there is not None and there.endswith(".md"):
            return f"[{text}]({posixpath.relpath(there, posixpath.dirname(page) or '.')}{anchor})"
        if repository:
            return f"[{text}]({repository.rstrip('/')}/blob/main/{path}{anchor})"
        return text if text.strip("`") == path else f"{text} (`{path}`)"

    parts = _CODE.split(markdown)
    return "".join(part if _CODE.fullmatch(part) else _LINK.sub(link, part) for part in parts)


def counts(html: str) -> dict[str, int]:
    """Numbers of the counted tags."""
    return {tag: len(re.findall(rf"<{tag}[ >]", html)) for tag in COUNTED}


def on_config(config: MkDocsConfig) -> Any:
    """Watch the files of the root too, while pages are written."""
    config.watch.extend(str(ROOT / source) for source in OF_THE_ROOT)
    return config
