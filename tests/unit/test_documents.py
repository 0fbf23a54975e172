"""Documents that are made of data, or can be checked against the tree."""

from __future__ import annotations

import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ON_HPU = re.findall(r"^ON_HPU *:= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split()
EVIDENCE = run_path(str(ROOT / "docs" / "evidence.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("name", ["acceptance", "api", "evidence", "models"])
def test_pages_that_are_made_are_up_to_date(name: str) -> None:
    made = run_path(str(ROOT / "docs" / f"{name}.py"))["page"]()
    assert (ROOT / "docs" / f"{name}.md").read_text() == made, f"run `python docs/{name}.py`"


def test_the_index_names_every_page() -> None:
    listed = (ROOT / "docs" / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in listed, page.name


@pytest.mark.parametrize("entry", EVIDENCE["features"](), ids=lambda entry: entry["feature"][:40])
def test_every_claim_has_its_evidence(entry: dict[str, Any]) -> None:
    assert set(entry) == {"feature", "cpu", "cuda", "hpu", "evidence"}
    assert entry["evidence"]
    for path in entry["evidence"]:
        assert (ROOT / path).exists(), path
    if entry["hpu"]:  # what is in that folder, or what `make test-hpu` runs
        there = ("tests/device/", *ON_HPU)
        assert any(path.startswith(there) for path in entry["evidence"]), "says that it ran there, but where?"
    if entry["cuda"]:  # what is in that folder, or what `make test-cuda` runs beside it
        there = ("tests/cuda/", "benchmarks/", *ON_HPU)
        assert any(path.startswith(there) for path in entry["evidence"]), "says that it ran there, but where?"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        if target.startswith("http"):
            continue
        other = page.parent / target if target else page
        assert other.exists(), target
        headings = re.findall(r"^#+ (.*)$", other.read_text(), re.MULTILINE) if anchor else []
        assert anchor in ["", *(re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in headings)], anchor


def test_what_help_texts_and_recipes_promise_is_in_an_extra_that_the_image_installs() -> None:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = {name: set(re.findall(r"^[\w-]+", text, re.M)) for name, text in setup["options.extras_require"].items()}
    installed = re.search(r"'\.\[(.*?)\]'", (ROOT / "docker" / "gaudi.Dockerfile").read_text())
    assert installed is not None
    for package in ("tokenizers", "zstandard", "matplotlib"):
        assert package in extras["dev"], "tests of it run"
        assert any(package in extras[name] for name in installed[1].split(",")), package


def test_the_image_keeps_intels_packages(tmp_path: Path) -> None:
    """pip is bound to what Intel has installed, and an image without torch is refused."""
    keep = ROOT / "docker" / "keep.py"
    assert "docker/keep.py > constraints.txt" in (ROOT / "docker" / "gaudi.Dockerfile").read_text()
    given = {"torch": "2.6.0+hpu.1.21.0.555", "habana_torch_plugin": "1.21.0.555", "rich": "14.0"}
    for name, version in given.items():
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def run(path: Path) -> subprocess.CompletedProcess[str]:
        code = f"import sys; sys.path[:] = [p for p in sys.path if 'packages' not in p] + [{str(path)!r}]\n"
        code += f"from runpy import run_path; run_path({str(keep)!r}, run_name='__main__')"
        return subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False)

    done = run(tmp_path)
    assert done.stdout.splitlines() == ["habana-torch-plugin==1.21.0.555", "torch==2.6.0+hpu.1.21.0.555"]
    empty = run(tmp_path / "empty")
    assert empty.returncode != 0
    assert "no torch in this image" in empty.stderr
