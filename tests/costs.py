"""Processor time of a test session, by test, file and part: ``pytest --costs FILE`` writes it as JSON.

A test's cost is what this process and all that descend from it have computed between the end of the test before and its
own end, pools and servers included; on a busy machine it says far more than the clock does. Only on Linux.

Run: ``python tests/costs.py FILE [OTHER FILE]`` to show the dearest files and tests, or what has changed.
After a session of all tests ``python tests/costs.py FILE --slow > tests/slow.txt`` keeps dear ones out of
the gate (``make test``).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

SLOW = 2.5
"""Seconds of processor time from which on a test is no quick one."""
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
    """A pytest plugin.

    Args:
        file: the JSON file to write.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
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

    def pytest_sessionfinish(self) -> None:
        self.parts["end"] = self._spend()[0]
        wall, tests = time.monotonic() - self.began, self.tests
        for file in self.file.parent.glob(f"{self.file.name}.gw*"):  # of processes of pytest-xdist
            part = json.loads(file.read_text())
            tests |= part["tests"]
            self.parts |= {f"{name}, {file.suffix[1:]}": value for name, value in part["parts"].items()}
            file.unlink()
        self.file.write_text(json.dumps({"wall": wall, "parts": self.parts, "tests": tests}))


def _by_file(run: dict[str, Any]) -> dict[str, dict[str, float]]:
    files: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for test, cost in run["tests"].items():
        row = files[test.partition("::")[0]]
        row["tests"] += 1
        for name, value in cost.items():
            row[name] += value
    return files


def show(run: dict[str, Any], most: int) -> None:
    """Print parts, files and tests of a run, the dearest first."""
    tests = run["tests"]
    total = sum(cost["cpu"] for cost in tests.values())
    print(f"{total:.0f} s of CPU in {len(tests)} tests, {run['wall']:.0f} s by the clock")
    print({name: round(value, 1) for name, value in run["parts"].items()})
    folders: dict[str, float] = defaultdict(float)
    rows = sorted(_by_file(run).items(), key=lambda pair: -pair[1]["cpu"])
    for file, row in rows:
        folders["/".join(Path(file).parts[:2])] += row["cpu"]
    print({name: round(value) for name, value in folders.items()})
    print("   cpu   here   wall tests procs  file")
    for file, row in rows[:most]:
        cost = [f"{row[name]:6.1f}" for name in ("cpu", "here", "wall")]
        print(*cost, f"{row['tests']:5.0f} {row['processes']:5.0f}  {file}")
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
    parser.add_argument("--slow", action="store_true", help="print the tests that tests/slow.txt should list, instead")
    options = parser.parse_args()
    runs = [json.loads(file.read_text()) for file in options.files]
    if options.slow:
        print("\n".join(sorted(name for name, test in runs[0]["tests"].items() if test["cpu"] > SLOW)))
    elif len(runs) == 1:
        show(runs[0], options.most)
    else:
        compare(runs[0], runs[1], options.most)


if __name__ == "__main__":
    sys.exit(main())
