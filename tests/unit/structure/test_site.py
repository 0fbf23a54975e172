"""The site of the documents: what its configuration must name, and where its links lead; `make docs` builds it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
CONFIGURATION: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
MADE = {"project.md", "contributing.md", "changelog.md"}
"""Pages that docs/site_hooks.py makes of files of the root; those of reference/ are from docstrings."""
VARIABLE = re.compile(
    r"\b(?:(?:PT_HPU|HABANA|HLS|PL|OMP|MKL|MALLOC|NCCL|MASTER|TORCH_ALLOW|TORCH_DEVICE|TORCH_INDUCTOR)_[A-Z_0-9]+"
    r"|GLIBC_TUNABLES|GC_KERNEL_PATH|CUDA_DEVICE_MAX_CONNECTIONS|NODE_RANK|PYTHONHASHSEED|CUBLAS_WORKSPACE_CONFIG"
    r"|LIGHTNING_MEGATRON_(?!HPU_SIM_)[A-Z_]+)\b"
)


def pages_of(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for below in entry.values() if isinstance(entry, dict) else entry:
            yield from pages_of(below)


def test_the_navigation_has_every_page_once() -> None:
    named = list(pages_of(CONFIGURATION["nav"]))
    there = {page.name for page in (ROOT / "docs").glob("*.md")} | MADE
    assert sorted(page for page in named if not page.startswith("reference/")) == sorted(there)


def test_faults_end_the_build() -> None:
    levels = [level for part in CONFIGURATION["validation"].values() for level in part.values()]
    assert CONFIGURATION["strict"] is True
    assert set(levels) == {"warn"}


def test_the_page_of_the_environment_has_the_variables_that_the_package_names() -> None:
    page = set(VARIABLE.findall((ROOT / "docs" / "environment.md").read_text()))
    sources = (ROOT / "lightning_megatron").rglob("*.py")
    named = {name for path in sources for name in VARIABLE.findall(path.read_text())}
    assert named <= page, sorted(named - page)


@pytest.fixture(scope="module")
def hooks() -> dict[str, Any]:
    pytest.importorskip("mkdocs")
    return run_path(str(ROOT / "docs" / "site_hooks.py"))


def test_links_of_pages_lead_to_pages_of_the_site(hooks: dict[str, Any]) -> None:
    relinked = hooks["relinked"]
    assert relinked("[a](docs/x.md#b) `[c](docs/y.md)`", "README.md", "project.md", None) == (
        "[a](x.md#b) `[c](docs/y.md)`"
    )
    assert relinked("[a](../README.md#b)", "docs/x.md", "x.md", None) == "[a](project.md#b)"
    assert relinked("[a](#b) [c](https://d.e/f)", "docs/x.md", "x.md", None) == "[a](#b) [c](https://d.e/f)"
    assert relinked("[a](../benchmarks/f.md)", "docs/x.md", "x.md", None) == "a (`benchmarks/f.md`)"
    assert relinked("[LICENSE](LICENSE)", "README.md", "project.md", None) == "LICENSE"
    assert relinked("[a](../benchmarks/f.md)", "docs/x.md", "x.md", "https://d.e/f/") == (
        "[a](https://d.e/f/blob/main/benchmarks/f.md)"
    )


def test_a_list_that_only_one_kind_of_markdown_sees_is_counted(hooks: dict[str, Any]) -> None:
    counts = hooks["counts"]
    assert counts("<ul><li>a</li><li class='b'>c</li></ul><pre>d</pre><link>") == {"li": 2, "table": 0, "pre": 1}


def test_every_public_name_has_its_place_in_the_reference(hooks: dict[str, Any]) -> None:
    names = hooks["public_names"]()
    pages = hooks["reference"](names)
    assert {f"reference/{page}.md" for page in pages} <= set(pages_of(CONFIGURATION["nav"]))
    text = "".join(pages.values())
    assert all(f"::: {module}.{name}\n" in text for module, found in names.items() for name in found)
