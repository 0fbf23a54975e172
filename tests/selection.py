"""Order of the tests, and account of those that a session leaves out: a pytest plugin.

Quick tests come first, slow ones next, exhaustive ones last, so that what does not fit into ``--budget`` is at the end.
Among the slow ones, those that are marked ``long`` begin first: no process is left with one when the others are done.
``--turn NUMBER/PARTS`` is for a job that runs again and again with other numbers: of the exhaustive tests it runs one
part, among the slow ones, and it begins at another file, so that what does not fit is not always the same.
The end of a session counts what was left out; ``--evidence`` names the features that it is evidence of.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

ROOT = Path(__file__).parents[1]
SLOW = Path(__file__).with_name("slow.txt")
"""Tests that are slow by measurement, beside those that carry the mark; made by ``tests/costs.py FILE --slow``."""
KINDS = ("quick", "slow", "exhaustive")
LEFT_OUT = "left_out"
T = TypeVar("T")


def add_options(parser: pytest.Parser) -> None:
    """Options of the plugin."""
    text = "skip what has not begun after that many minutes, and exhaustive tests after three quarters of them"
    parser.addoption("--budget", type=float, default=float("inf"), metavar="MINUTES", help=text)
    text = "run one of so many parts of the exhaustive tests, and begin at another file with each number"
    parser.addoption("--turn", type=Turn.parse, metavar="NUMBER/PARTS", help=text)
    text = "name the features of docs/evidence.yaml of which tests were left out"
    parser.addoption("--evidence", action="store_true", help=text)


@dataclass(frozen=True)
class Turn:
    """One of many sessions that share the work.

    Attributes:
        number: any whole number; a hash of a commit is a good one.
        parts: sessions that the exhaustive tests are dealt out to.
    """

    number: int
    parts: int

    @classmethod
    def parse(cls, text: str) -> Turn:
        """``12/4`` is the first of four parts: 12 modulo 4 is 0."""
        number, parts = map(int, text.split("/"))
        return cls(number, parts)

    @property
    def part(self) -> int:
        """Part of the exhaustive tests that is run, from 0."""
        return self.number % self.parts

    def rotated(self, items: Sequence[T]) -> list[T]:
        """The items from another one on."""
        begin = self.number % len(items) if items else 0
        return [*items[begin:], *items[:begin]]

    def others(self, exhaustive: Iterable[str]) -> set[str]:
        """Those tests that belong to other parts; the parts are dealt out in alphabetical order."""
        return {test for index, test in enumerate(sorted(exhaustive)) if index % self.parts != self.part}


def kind_of(item: pytest.Item) -> str:
    """``quick``, ``slow`` or ``exhaustive``."""
    return next((kind for kind in reversed(KINDS) if item.get_closest_marker(kind) is not None), KINDS[0])


def ordered(items: Sequence[pytest.Item], turn: Turn | None) -> list[pytest.Item]:
    """Kind by kind, and file by file inside of a kind; with a turn, slow and exhaustive tests are of one kind."""
    found: list[pytest.Item] = []
    for kinds in [KINDS[:1], KINDS[1:]] if turn else [(kind,) for kind in KINDS]:
        chosen = [item for item in items if kind_of(item) in kinds]
        long = [item for item in chosen if kind_of(item) == "slow" and item.get_closest_marker("long")]
        found += long
        chosen = [item for item in chosen if item not in long]
        files = [list(group) for _, group in groupby(chosen, lambda item: item.path)]
        found += [item for file in (turn.rotated(files) if turn else files) for item in file]
    return found


class Selection:
    """The plugin.

    Args:
        config: configuration of the session.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.turn: Turn | None = config.getoption("--turn")
        self.budget = 60 * config.getoption("--budget")
        self.names_features = config.getoption("--evidence")
        self.by_hand = bool(config.option.keyword)  # a selection by name needs no account of the others
        self.begun = time.monotonic()
        self.elsewhere: set[str] = set()
        self.left_out: dict[str, str] = {}
        self.ran: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        slow = set(SLOW.read_text().splitlines())
        for item in items:
            if item.nodeid in slow:
                item.add_marker("slow")
        items[:] = ordered(items, self.turn)
        if self.turn is not None:
            self.elsewhere = self.turn.others(item.nodeid for item in items if kind_of(item) == "exhaustive")

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        if not self.by_hand:
            self.left_out |= {item.nodeid: kind for item in items if (kind := kind_of(item)) != KINDS[0]}

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        spent, share = time.monotonic() - self.begun, 0.75 if kind_of(item) == "exhaustive" else 1.0
        if item.nodeid in self.elsewhere:
            reason = "of other turns"
        elif spent > share * self.budget:
            reason = f"beyond {share * self.budget / 60:.0f} minutes"
        else:
            return
        item.user_properties.append((LEFT_OUT, reason))
        pytest.skip(reason)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reason = dict(report.user_properties).get(LEFT_OUT)
        if reason is not None:
            self.left_out[report.nodeid] = str(reason)
        elif report.when == "call":
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
