"""Order of the tests, parts of them, and account of those that a session leaves out: a pytest plugin.

Slow tests of the gate come first, then quick ones, other slow ones, exhaustive ones. Among the slow ones, those that
are marked ``long`` begin first: no process is left with one when the others are done. ``--part 2/4`` runs the second of
four parts of the tests.
The end of a session counts what was left out; ``--evidence`` names the features that it is evidence of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import simulated_gaudi as hpu
import yaml

ROOT = Path(__file__).parents[1]
SLOW = Path(__file__).with_name("slow.txt")
"""Tests that are slow by measurement, beside those that carry the mark; made by ``tests/costs.py FILE --slow``."""
SLOW_ON_GAUDI = Path(__file__).with_name("slow_on_gaudi.txt")
"""More of them on a simulated Gaudi: from 1.2 s on, and nothing new about a device where the CPU has run them."""
KINDS = ("quick", "slow", "exhaustive")
LEFT_OUT = "left_out"


def add_options(parser: pytest.Parser) -> None:
    """Options of the plugin."""
    parser.addoption("--part", type=part, metavar="N/PARTS", help="run one of so many parts of the tests, from 1")
    text = "name the features of docs/evidence.yaml of which tests were left out"
    parser.addoption("--evidence", action="store_true", help=text)


def part(text: str) -> tuple[int, int]:
    """``2/4`` is the second of four."""
    number, parts = map(int, text.split("/"))
    if not 1 <= number <= parts:
        raise ValueError(text)
    return number, parts


def of_part(tests: dict[str, str], number: int, parts: int) -> set[str]:
    """Tests of one part; those of each kind are dealt out in alphabetical order.

    Args:
        tests: kinds by name.
        number: number of the part, from 1.
        parts: number of the parts.
    """
    found: set[str] = set()
    for kind in KINDS:
        found |= set(sorted(test for test in tests if tests[test] == kind)[number - 1 :: parts])
    return found


def kind_of(item: pytest.Item) -> str:
    """``quick``, ``slow`` or ``exhaustive``."""
    return next((kind for kind in reversed(KINDS) if item.get_closest_marker(kind) is not None), KINDS[0])


def rank_of(item: pytest.Item) -> float:
    """Place of a test among those of other kinds."""
    if item.get_closest_marker("gate") is not None:
        return -1.0
    kind = kind_of(item)
    return KINDS.index(kind) - 0.5 * (kind == "slow" and item.get_closest_marker("long") is not None)


class Selection:
    """The plugin.

    Args:
        config: configuration of the session.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.part: tuple[int, int] | None = config.getoption("--part")
        self.names_features = config.getoption("--evidence")
        self.by_hand = bool(config.option.keyword)  # a selection by name needs no account of the others
        self.left_out: dict[str, str] = {}
        self.ran: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        lists = (SLOW, SLOW_ON_GAUDI) if hpu.enabled() else (SLOW,)
        slow = {test for names in lists for test in names.read_text().splitlines()}
        for item in items:
            if item.nodeid in slow:
                item.add_marker("slow")
        items.sort(key=rank_of)
        if self.part is not None:
            mine = of_part({item.nodeid: kind_of(item) for item in items}, *self.part)
            others = [item for item in items if item.nodeid not in mine]
            config.hook.pytest_deselected(items=others)
            self.left_out |= dict.fromkeys((item.nodeid for item in others), "of other parts")
            items[:] = [item for item in items if item.nodeid in mine]

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        if not self.by_hand:
            self.left_out |= {item.nodeid: kind for item in items if (kind := kind_of(item)) != KINDS[0]}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.ran.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output[LEFT_OUT] = self.left_out

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A process of pytest-xdist has ended: tests are deselected there."""
        self.left_out |= getattr(node, "workeroutput", {}).get(LEFT_OUT, {})

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.names_features:
            lines = list(lacking(features(), self.ran, self.left_out))
            terminalreporter.section(f"features of which tests were left out: {len(lines)}")
            for line in lines:
                terminalreporter.write_line(line)
        if self.left_out:
            terminalreporter.write_line(account(self.left_out), yellow=True)


def account(left_out: dict[str, str]) -> str:
    """One line for the end of a session."""
    counts = ", ".join(f"{number} {reason}" for reason, number in sorted(Counter(left_out.values()).items()))
    return f"left out: {counts}; `make test-all` runs all tests"


def features() -> list[dict[str, Any]]:
    """Entries of docs/evidence.yaml."""
    found: list[dict[str, Any]] = yaml.safe_load((ROOT / "docs" / "evidence.yaml").read_text())
    return found


def lacking(entries: Iterable[dict[str, Any]], ran: Iterable[str], left_out: dict[str, str]) -> Iterator[str]:
    """A line for each feature of which tests were left out."""
    ran = list(ran)
    for entry in entries:
        paths = tuple(entry["evidence"])
        reasons = Counter(reason for test, reason in left_out.items() if test.startswith(paths))
        if reasons:
            number = sum(test.startswith(paths) for test in ran)
            counts = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
            yield f"{entry['feature'].strip()}: {number} ran; left out: {counts}"
