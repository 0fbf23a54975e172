"""Documents that are made of data, or can be checked against the tree."""

from __future__ import annotations

import re
from configparser import ConfigParser
from pathlib import Path
from runpy import run_path
from typing import Any
from urllib.parse import urlsplit

import pytest

from lightning_megatron.machine.gaudi import OLDEST_TORCH, SUPPORT_MATRIX, minor

ROOT = Path(__file__).parents[3]
ON_HPU = re.findall(r"^ON_HPU *:= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split()
EVIDENCE = run_path(str(ROOT / "docs" / "evidence.py"))
CLUSTERS = run_path(str(ROOT / "docs" / "clusters.py"))
ROWS = run_path(str(ROOT / "docs" / "rows.py"))["entries"]()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


MADE = ["acceptance", "api", "clusters", "evidence", "first_hour", "lightning_suite", "models", "rows"]


@pytest.mark.parametrize("name", MADE)
def test_pages_that_are_made_are_up_to_date(name: str) -> None:
    made = run_path(str(ROOT / "docs" / f"{name}.py"))
    assert made["PAGE"].read_text() == made["page"](), f"run `python docs/{name}.py`"


@pytest.mark.parametrize("row", CLUSTERS["rows"](), ids=lambda row: row["row"][:40])
def test_every_row_of_clusters_has_its_tests_or_its_reason(row: dict[str, Any]) -> None:
    assert row["state"] in ("yes", "out")
    assert set(row) == {"row", "state", "held" if row["state"] == "yes" else "reason"}
    assert all((ROOT / path).is_file() for path in row.get("held", ()))
    assert row.get("held") or row.get("reason")


KEYS = {"yes": {"held"}, "part": {"held", "lacks"}, "out": {"reason"}}


@pytest.mark.parametrize("entry", [*ROWS["rows"], *ROWS["features"]], ids=lambda e: str(e.get("row", e.get("feature"))))
def test_every_row_has_its_tests_or_says_what_is_missing(entry: dict[str, Any]) -> None:
    head = {"row", "priority", "item"} if "row" in entry else {"feature"}
    assert set(entry) - {"note"} == head | {"state"} | KEYS[entry["state"]]
    assert all(entry.values())
    for held in entry.get("held", ()):
        path, _, name = held.partition("::")
        text = (ROOT / path).read_text()
        assert Path(path).name.startswith("test_"), path
        assert f"def {name or 'test_'}" in text, held


def test_the_table_has_all_rows() -> None:
    assert [entry["row"] for entry in ROWS["rows"]] == list(range(1, 151))
    assert {entry["priority"] for entry in ROWS["rows"]} == {"core", "should", "edge"}
    assert len({entry["feature"] for entry in ROWS["features"]}) == 75


def test_the_lines_of_families_are_measured() -> None:
    """Families are all there; a line more in shared code is no reason to measure again."""
    made = run_path(str(ROOT / "docs" / "families.py"))["page"]()
    number = re.compile(r"(?<= )\d+(?= )")
    kept = (ROOT / "docs" / "add-a-family.md").read_text()
    assert number.sub("N", kept) == number.sub("N", made), "run `python docs/families.py`"
    pairs = list(zip(number.findall(kept), number.findall(made), strict=True))
    assert all(abs(int(a) - int(b)) <= 10 + int(b) // 4 for a, b in pairs), "run `python docs/families.py`"


def test_the_index_names_every_page() -> None:
    listed = (ROOT / "docs" / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in listed, page.name


@pytest.mark.parametrize("entry", EVIDENCE["features"](), ids=lambda entry: entry["feature"][:40])
def test_every_claim_has_its_evidence(entry: dict[str, Any]) -> None:
    assert set(entry) - {"target", "beyond"} == {"feature", "cpu", "cuda", "hpu", "evidence"}
    assert entry["evidence"]
    for path in entry["evidence"]:
        assert (ROOT / path).exists(), path
    if entry["hpu"]:  # what is in that folder, or what `make test-hpu` runs
        there = ("tests/device/", *ON_HPU)
        assert any(path.startswith(there) for path in entry["evidence"]), "says that it ran there, but where?"
    if entry["cuda"]:  # what is in that folder, or what `make test-cuda` runs beside it
        there = ("tests/cuda/", "benchmarks/", *ON_HPU)
        assert any(path.startswith(there) for path in entry["evidence"]), "says that it ran there, but where?"


def test_a_run_of_all_tests_is_told_with_its_date_and_commit(tmp_path: Path) -> None:
    suite = '<testsuites><testsuite tests="{}" failures="1" errors="1" skipped="3" timestamp="2026-11-{}T03:04:05.6"/>'
    parts = [tmp_path / "first.xml", tmp_path / "second.xml"]
    for part, numbers in zip(parts, [(10, "03"), (20, "02")], strict=True):
        part.write_text(suite.format(*numbers) + "</testsuites>")
    kept = EVIDENCE["read_reports"](parts, "0123abcd")
    assert kept == {"date": "2026-11-02", "commit": "0123abcd", "passed": 20, "skipped": 6, "failed": 4}
    told = "All tests ran last on 2026-11-02, at commit `0123abcd`: 20 passed, 6 skipped, 4 failed."
    assert EVIDENCE["ran"](kept) == told
    assert EVIDENCE["ran"](EVIDENCE["last_run"]()) in EVIDENCE["page"]()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tests_that_a_page_names_exist(page: Path) -> None:
    for path, name in re.findall(r"\b(tests/[\w/]+\.py)(?:::(\w+))?", page.read_text()):
        assert (ROOT / path).exists(), path
        assert not name or f"def {name}(" in (ROOT / path).read_text(), f"{path}::{name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        if target.startswith("http"):
            continue
        other = page.parent / target if target else page
        assert other.exists(), target
        headings = re.findall(r"^#+ (.*)$", other.read_text(), re.MULTILINE) if anchor else []
        assert anchor in ["", *(re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in headings)], anchor


ADDRESS = re.compile(r"https?://[^\s)>`\"']+")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_addresses_have_the_right_form(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for address in (found.rstrip(".,;:") for found in ADDRESS.findall(text)):
        parts = urlsplit(address)
        assert parts.scheme == "https", address
        assert re.fullmatch(r"([\w-]+\.)+[a-z]{2,}", parts.netloc), address
        assert parts.netloc != "arxiv.org" or re.fullmatch(r"/abs/\d{4}\.\d{4,5}", parts.path), address


def test_the_changelog_names_the_megatron_that_ours_is_compared_with() -> None:
    made_with = (ROOT / "tests/unit/data/golden/make.py").read_text()
    (version,) = re.findall(r"megatron-core (\d+\.\d+\.\d+);", made_with)
    for name in ("CHANGELOG.md", "docs/megatron-checkpoints.md", "tests/unit/checkpoint/formats/golden/README.md"):
        assert f"megatron-core {version}" in (ROOT / name).read_text(), name


def test_pages_have_the_releases_of_gaudis_software_that_the_doctor_has() -> None:
    (told,) = re.findall(r"\((1\.\d+) or newer, torch (2\.\d+) to (2\.\d+)\)", (ROOT / "README.md").read_text())
    fits = {release: version for release, version in SUPPORT_MATRIX.items() if of(version) >= OLDEST_TORCH}
    assert told == (min(fits, key=of), min(fits.values(), key=of), max(fits.values(), key=of))
    page = (ROOT / "docs" / "gaudi.md").read_text()
    pairs = re.findall(r"(1\.\d+\.\d+) with (2\.\d+)\.\d+", page)
    assert pairs
    assert all((SUPPORT_MATRIX.get(r) or SUPPORT_MATRIX[minor(r)]) == version for r, version in pairs)


def of(version: str) -> tuple[int, ...]:
    """``"1.24"`` -> ``(1, 24)``."""
    return tuple(map(int, version.split(".")))


def test_what_help_texts_and_recipes_promise_is_in_an_extra_that_the_image_installs() -> None:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = {name: set(re.findall(r"^[\w-]+", text, re.M)) for name, text in setup["options.extras_require"].items()}
    installed = re.search(r"'\.\[(.*?)\]'", (ROOT / "docker" / "gaudi.Dockerfile").read_text())
    assert installed is not None
    for package in ("tokenizers", "zstandard", "matplotlib"):
        assert package in extras["dev"], "tests of it run"
        assert any(package in extras[name] for name in installed[1].split(",")), package
