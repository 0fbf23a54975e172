"""Write docs/acceptance.md, the numbered checks of tests/acceptance: ``python docs/acceptance.py``; a test compares."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE / "acceptance.md"
TESTS = HERE.parent / "tests" / "acceptance"
NUMBERS = re.compile(r"test_((?:\d+_(?:and_)?)+)(\w+)")
HEAD = """\
<!-- made from the names of tests by `python docs/acceptance.py` -->
# Acceptance checks

Each is what a user of stock Lightning may count on, held on every layout against stock Lightning on one device; a test
named `test_07_...` holds check 7.

Check 48 (with one rank and one micro-batch a step takes at most 2% more than a hand-written loop, and sharing logs less
than 1% of a step) is no test: on a machine that others use too, a step's time differs by more than that from process to
process. `benchmarks/overhead.py` measures it, and `benchmarks/overhead_pipeline_cpu_202611.md` has the result: the
median of eleven processes is 0.99, and sharing logs takes 0.5 to 0.7%.

| check | holds that | in `tests/acceptance/` |
|---|---|---|
"""


def checks() -> Iterator[tuple[list[int], str, str]]:
    """Numbers, sentence and file of each test."""
    for path in sorted(TESTS.glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            found = NUMBERS.fullmatch(node.name) if isinstance(node, ast.FunctionDef) else None
            if found is not None:
                yield [int(number) for number in re.findall(r"\d+", found[1])], found[2].replace("_", " "), path.name


def page() -> str:
    """docs/acceptance.md as it must be."""
    rows = sorted(checks(), key=lambda check: check[0])
    return HEAD + "".join(f"| {', '.join(map(str, numbers))} | {text} | `{file}` |\n" for numbers, text, file in rows)


if __name__ == "__main__":
    PAGE.write_text(page())
