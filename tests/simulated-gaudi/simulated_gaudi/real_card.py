"""Rules of ``tests/device/rules`` on the cards of this machine: ``pytest tests/device --hpu-real``.

The session that the user starts touches no card. It starts processes that try the rules, one after another, and writes
their answers into the report. A rule that ends its process, or takes too long, is noted; another process tries the
rest. Rules for several processes come last, from a process that holds no card itself.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from simulated_gaudi.report import ENDED, TOO_LONG, Report

REAL, REPORT, LIMIT, PART = "--hpu-real", "--hpu-report", "--hpu-limit", "--hpu-part"
_CARDS = ("hl-smi", "-Q", "index,module_id,bus_id,name,driver_version,memory.total,memory.used", "-f", "csv,noheader")

_STARTING = 600.0
"""Seconds that a process has to import everything and to acquire a card."""


def add_options(parser: pytest.Parser) -> None:
    """Add the options of a session on real cards."""
    group = parser.getgroup("real HPU")
    text = "try the rules of tests/device/rules on the cards of this machine, and write a report"
    group.addoption(REAL, action="store_true", help=text)
    text = "file of the report (default hpu-conformance.json)"
    group.addoption(REPORT, type=Path, default=Path("hpu-conformance.json"), metavar="PATH", help=text)
    text = "time limit of a rule (default 300): one that takes longer is ended, and the next one is tried"
    group.addoption(LIMIT, type=float, default=300.0, metavar="SECONDS", help=text)
    group.addoption(PART, type=json.loads, help=argparse.SUPPRESS)  # of a process that tries rules


def supervise(config: pytest.Config) -> int | None:
    """Try all rules in other processes; do nothing in an ordinary session, or in one of those processes.

    Returns:
        ``None`` if there was nothing to do; 0 if all rules hold, 1 if some do not, or the exit code of a failed start.
    """
    if not config.getoption(REAL) or config.getoption(PART) is not None:
        return None
    report = Report(config.getoption(REPORT))
    report.facts = {"begun": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "finished": False, "cards": cards()}
    trial = Trial(report, list(map(str, config.invocation_params.args)), config.getoption(LIMIT))
    code = 0
    # Killed processes leave files behind.
    with TemporaryDirectory(prefix="hpu-rules-", ignore_cleanup_errors=True) as folder:
        for several in (False, True):
            code = code or trial.all_rules(several, folder)
    report.facts["finished"] = code == 0
    report.write()
    print(f"\n{report.path}: {_counted(report)}")
    for name in report.faults:
        rule = report.rules[name]
        print(f"  {rule.status}: {name}: {rule.found.splitlines()[0] if rule.found else ''}")
    return code or int(bool(report.faults))


def cards() -> list[str]:
    """Cards according to the driver's own tool, as it prints them; empty without the tool."""
    if shutil.which(_CARDS[0]) is None:
        return []
    try:
        done = subprocess.run(_CARDS, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return [f"{' '.join(_CARDS)}: {error}"]
    return [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]


def _counted(report: Report) -> str:
    statuses = [rule.status for rule in report.rules.values()]
    return ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses)) or "no rule was tried"


class Trial:
    """Processes that try rules, one at a time.

    Args:
        report: the report that their answers go to.
        arguments: arguments of the session, which are passed to the processes.
        limit: seconds after which a silent process is ended.
    """

    def __init__(self, report: Report, arguments: list[str], limit: float) -> None:
        self._report, self._arguments, self._limit = report, arguments, limit
        self._running: str | None = None
        self._begun = 0.0

    def all_rules(self, several: bool, folder: str) -> int:
        """Start processes until all rules have an outcome, or one process ends without a new one.

        Args:
            several: True for the rules that need several processes, False for the others.
            folder: folder of their temporary files.

        Returns:
            0, or the exit code of a process that ended before it had tried a rule.
        """
        while True:
            before = len(self._report.done)
            code, complete = self._one_process(several, folder)
            if complete:
                return 0
            if len(self._report.done) == before:
                self._report.facts["fault"] = f"a process ended with exit code {code} before it had tried a rule"
                self._report.write()
                return code or 1

    def _one_process(self, several: bool, folder: str) -> tuple[int, bool]:
        """Run one process; return its exit code, and True if it reported that it had tried all rules."""
        reading, writing = os.pipe()
        part = json.dumps({"pipe": writing, "several": several, "done": self._report.done})
        stacks = f"faulthandler_timeout={0.9 * self._limit}"  # pytest shows where a rule hangs, before it is ended
        options = ["-p", "no:xdist", "-o", stacks]
        command = [sys.executable, "-m", "pytest", *options, *self._arguments, PART, part]
        environment = {**os.environ, "TMPDIR": folder}
        process = subprocess.Popen(command, env=environment, pass_fds=[writing], start_new_session=True)
        os.close(writing)
        self._running, complete, silent = None, False, True
        try:
            for said in _lines(reading, lambda: self._limit if self._running else max(self._limit, _STARTING)):
                if said is None:
                    break
                complete = self._note(said) or complete
            else:
                silent = False
            if not silent:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(30)
        finally:
            os.close(reading)
            _end(process)
        if self._running is not None:
            if silent:
                outcome = {"status": TOO_LONG, "found": f"no answer after {self._limit:g} s; the process was ended"}
            else:
                outcome = {"status": ENDED, "found": f"the process ended with {_how(process.returncode)}"}
            self._report.end(self._running, seconds=round(time.monotonic() - self._begun, 3), **outcome)
        return process.returncode or 0, complete

    def _note(self, said: dict[str, Any]) -> bool:
        """Record a message of a process; True if it says that all rules were tried."""
        if "facts" in said:
            self._report.facts |= said["facts"]
        elif "rules" in said:
            self._report.add(said["rules"])
        elif "begin" in said:
            self._running, self._begun = said["begin"], time.monotonic()
        elif "end" in said:
            self._running = None
            self._report.end(said.pop("end"), **said)
        return "complete" in said


def _lines(pipe: int, limit: Callable[[], float]) -> Iterator[dict[str, Any] | None]:
    """Objects from a pipe until it is closed; ``None`` after ``limit()`` seconds without one."""
    rest = b""
    while True:
        if not select.select([pipe], [], [], limit())[0]:
            yield None
            return
        more = os.read(pipe, 1 << 16)
        if not more:
            return
        *lines, rest = (rest + more).split(b"\n")
        yield from map(json.loads, lines)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all its children; a card is released when its process has ended."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # a process that waits in the driver cannot be ended
        process.wait(30)


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
