"""The counters behind docs/measures.md, on sources whose counts are known."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from structure import ROOT


@pytest.fixture(scope="module")
def measures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measures", ROOT / "docs" / "measures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_step_back_to_a_module_is_a_return(measures: ModuleType) -> None:
    assert measures.returns(["a", "a", "b", "a", "c", "b", "b"]) == 2


def test_a_field_is_named_by_attributes_keywords_and_texts(measures: ModuleType) -> None:
    sources = {"a": "x.width + 1", "b": "call(width=2)", "c": 'known = ("width",)', "d": "width = 1"}
    trees = {Path(name): ast.parse(source) for name, source in sources.items()}
    assert measures.files_by_field(trees, ["width", "depth"]) == {"width": [Path(name) for name in "abc"], "depth": []}


def test_comments_and_splatted_tuples_are_counted(measures: ModuleType, tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text('"""Text\nof two lines."""\n\n# why\ncall(*items)  # and why\ncall(1,\n     2)  # noqa: E111\n')
    assert measures.share_of_comments([source]) == 2 / 4
    assert measures.splatted([ast.parse(source.read_text())]) == 1


def test_files_belong_to_houses(measures: ModuleType) -> None:
    houses = {"layers/mlp.py": "core", "tools/planning/search.py": "tools", "encoders/t5/model.py": "encoders"}
    assert {path: measures.house_of(measures.PACKAGE / path) for path in houses} == houses


def test_the_page_has_a_number_for_each_measure(measures: ModuleType) -> None:
    rows = re.findall(r"^\| (.+) \| +[\d,.%]+ \|$", measures.PAGE.read_text(), re.MULTILINE)
    assert len(rows) == len(set(rows)) == 19
    assert all((measures.PACKAGE / name).is_dir() for name in measures.HOUSES)
