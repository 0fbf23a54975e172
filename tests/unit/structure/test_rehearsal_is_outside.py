"""Production code does not know rehearsals: they hand in their own ranks, groups and tensors from ``tools/``."""

from __future__ import annotations

import re

import pytest
from structure import ROOT, files

PACKAGE = ROOT / "lightning_megatron"
OUTSIDE = {"tools", "testing"}
TABLE = "lightning/compat/_private.py"  # of the private names that the whole package touches, tools too
KNOWS = re.compile(r"rehears|fake.?tensor|_subclasses|fake_pg", re.IGNORECASE)
ASKS_FOR_META = re.compile(r"\bis_meta\b|[=!]= \"meta\"|\"meta\" [=!]=")
META = {
    "adapters/layers.py": "a model that is not built yet",
    "checkpoint/integrity/unpacked_size.py": "a file without values",
    "layers/init.py": "a model that is not built yet",
    "models/stages.py": "a model that is not built yet",
    "optim/param_groups.py": "an optimizer of a model that is not built yet",
}
"""Modules that ask if a tensor is on the meta device, and what they find there."""


def found(text: str, name: str) -> list[str]:
    """Lines of a production module that know rehearsals, or ask for the meta device without a reason in the table."""
    patterns = [KNOWS] if name in META else [KNOWS, ASKS_FOR_META]
    return [line.strip() for line in text.splitlines() if any(pattern.search(line) for pattern in patterns)]


def production() -> dict[str, str]:
    paths = {str(path.relative_to(PACKAGE)): path for path in files()}
    return {
        name: path.read_text() for name, path in paths.items() if name.split("/")[0] not in OUTSIDE and name != TABLE
    }


def test_no_production_module_knows_rehearsals() -> None:
    lines = {name: found(text, name) for name, text in production().items()}
    assert {name: each for name, each in lines.items() if each} == {}


def test_the_table_names_modules_that_ask() -> None:
    modules = production()
    assert [name for name in META if not ASKS_FOR_META.search(modules[name])] == []


@pytest.mark.parametrize(
    "line",
    ["if mesh.rehearsed is not None:", "if isinstance(x, FakeTensor):", "if x.is_meta:", 'if x.device.type == "meta":'],
)
def test_a_planted_question_is_found(line: str) -> None:
    assert found(f"def f(mesh, x):\n    {line}\n        return 0\n", "comm/objects.py") == [line]
