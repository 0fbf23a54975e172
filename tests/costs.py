"""Processor time of a test session, by test, file and part.

``pytest --costs FILE`` writes it as JSON; ``pytest --dearest 10`` prints the ten files that took most.

A test's cost is what this process and all that descend from it have computed between the end of the test before and its
own end, pools and servers included; on a busy machine it says far more than the clock does. Only on Linux.

Run: ``python tests/costs.py FILE [OTHER FILE]`` to show the dearest files and tests, or what has changed.
After a session of all tests ``python tests/costs.py FILE --slow > tests/slow.txt`` keeps dear ones out of
the gate (``make test``), and after one on a simulated Gaudi ``--slow 1.2 > tests/slow_on_gaudi.txt`` those that it need
not repeat; strike out what tries the device itself.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SLOW = 2.5
"""Seconds of processor time from which on a test is no quick one."""
PART = "costs"
TICK = os.sysconf("SC_CLK_TCK")


def _descendants(pid: str) -> list[str]:
    found = [pid]
    for process in found:  # grows as it goes
        try:
            threads = os.listdir(f"/proc/{process}/task")
            for thread in threads:
                found += Path(f"/proc/{process}/task/{thread}/children").read_text().split()
        except OSError:  # it has ended
            continue
    return found


def _seconds(pid: str) -> float:
    """User and system time of a process and of those of its children that it has waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / TICK


class Costs:
    """A pytest plugin. Processes of pytest-xdist send their part to the session that started them.

    Args:
        file: the JSON file to write, if any.
        dearest: number of files to print at the end of the session.
    """

    def __init__(self, file: Path | None, dearest: int = 0) -> None:
        self.file, self.dearest = file, dearest
        self.seen: set[str] = set()
        self.tests: dict[str, dict[str, Any]] = {}
        self.parts: dict[str, float] = {}
        self.began = time.monotonic()
        self._total = self._own = 0.0
        self.parts["start"] = self._spend()[0]

    def _spend(self) -> tuple[float, float, int]:
        """Seconds since the last call: of all processes, of this one; and processes not seen before."""
        tree = _descendants(str(os.getpid()))
        total, own = sum(map(_seconds, tree)), time.process_time()
        new = set(tree) - self.seen
        spent = max(0.0, total - self._total), own - self._own, len(new)
        self._total, self._own = total, own
        self.seen |= new
        return spent

    def pytest_collection_finish(self) -> None:
        self.parts["collection"] = self._spend()[0]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        begun = time.monotonic()
        result = yield
        total, own, processes = self._spend()
        self.tests[item.nodeid] = {"cpu": total, "here": own, "wall": time.monotonic() - begun, "processes": processes}
        return result

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.parts["end"] = self._spend()[0]
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output[PART] = {"tests": self.tests, "parts": self.parts}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take the part of a process of pytest-xdist."""
        part = getattr(node, "workeroutput", {}).get(PART, {"tests": {}, "parts": {}})
        self.tests |= part["tests"]
        self.parts |= {f"{name}, {node.gateway.id}": value for name, value in part["parts"].items()}

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        run = {"wall": time.monotonic() - self.began, "parts": self.parts, "tests": self.tests}
        if self.file is not None:
            self.file.write_text(json.dumps(run))
        if self.dearest:
            terminalreporter.section("files that took most CPU seconds")
            for line in lines_of_files(run, self.dearest):
                terminalreporter.write_line(line)


def _by_file(run: dict[str, Any]) -> dict[str, dict[str, float]]:
    files: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for test, cost in run["tests"].items():
        row = files[test.partition("::")[0]]
        row["tests"] += 1
        for name, value in cost.items():
            row[name] += value
    return files


def lines_of_files(run: dict[str, Any], most: int) -> Iterator[str]:
    """The totals of a run, and its files that took most CPU seconds."""
    total = sum(cost["cpu"] for cost in run["tests"].values())
    yield f"{total:.0f} s of CPU in {len(run['tests'])} tests, {run['wall']:.0f} s by the clock"
    yield "   cpu   here   wall tests procs  file"
    rows = sorted(_by_file(run).items(), key=lambda pair: -pair[1]["cpu"])
    for file, row in rows[:most]:
        cost = " ".join(f"{row[name]:6.1f}" for name in ("cpu", "here", "wall"))
        yield f"{cost} {row['tests']:5.0f} {row['processes']:5.0f}  {file}"


def show(run: dict[str, Any], most: int) -> None:
    """Print parts, files and tests of a run, the dearest first."""
    tests = run["tests"]
    print({name: round(value, 1) for name, value in run["parts"].items()})
    folders: dict[str, float] = defaultdict(float)
    for test, cost in tests.items():
        folders["/".join(Path(test.partition("::")[0]).parts[:2])] += cost["cpu"]
    print({name: round(value) for name, value in sorted(folders.items(), key=lambda pair: -pair[1])})
    print("\n".join(lines_of_files(run, most)))
    print("   cpu   here   wall procs  test")
    for test, cost in sorted(tests.items(), key=lambda pair: -pair[1]["cpu"])[:most]:
        print(*(f"{cost[name]:6.1f}" for name in ("cpu", "here", "wall")), f"{cost['processes']:5.0f}  {test}")


def compare(before: dict[str, Any], after: dict[str, Any], most: int) -> None:
    """Print CPU seconds of files in two runs, the largest change first."""
    old, new = _by_file(before), _by_file(after)
    rows = [(old[file]["cpu"], new[file]["cpu"], file) for file in {**old, **new}]
    print(f"{sum(row[0] for row in rows):.0f} s -> {sum(row[1] for row in rows):.0f} s of CPU")
    for was, now, file in sorted(rows, key=lambda row: -abs(row[0] - row[1]))[:most]:
        print(f"{was:6.1f} -> {now:6.1f}  {file}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--most", type=int, default=40)
    text = f"print the tests that take more CPU seconds (default: {SLOW}), instead"
    parser.add_argument("--slow", type=float, nargs="?", const=SLOW, metavar="SECONDS", help=text)
    options = parser.parse_args()
    runs = [json.loads(file.read_text()) for file in options.files]
    if options.slow is not None:
        print("\n".join(sorted(name for name, test in runs[0]["tests"].items() if test["cpu"] > options.slow)))
    elif len(runs) == 1:
        show(runs[0], options.most)
    else:
        compare(runs[0], runs[1], options.most)


if __name__ == "__main__":
    sys.exit(main())
