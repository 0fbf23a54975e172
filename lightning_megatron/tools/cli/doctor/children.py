"""Processes that try a device, and may die or hang there: starting, watching and killing them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_megatron.machine.finding import Finding

_EVERY = 0.1
_GRACE = 10.0
"""Seconds for the other process of a pair after one has failed, and for a killed process to end."""
_TEXT = 600
"""Characters of a failed process's output that are shown."""


class Child:
    """A process that writes the trials that it starts, and its findings, into a file.

    Args:
        folder: folder for its files.
        name: name of its files.
        words: arguments of ``lightning_megatron.tools.cli.doctor.child``.
    """

    def __init__(self, folder: Path, name: str, words: Sequence[str]) -> None:
        self._results, self._log = folder / f"{name}.jsonl", folder / f"{name}.log"
        self._results.touch()
        command = [sys.executable, "-m", "lightning_megatron.tools.cli.doctor.child", str(self._results), *words]
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; ``None`` while it runs."""
        return self._process.poll()

    @property
    def progress(self) -> int:
        """A number that grows with every start and finding of the process."""
        return self._results.stat().st_size

    @property
    def findings(self) -> list[Finding]:
        """Findings so far."""
        return [Finding(**line["finding"]) for line in self._lines() if "finding" in line]

    @property
    def begun(self) -> str:
        """Name of the trial that it started last; empty before the first one."""
        return next((str(line["begin"]) for line in reversed(self._lines()) if "begin" in line), "")

    @property
    def is_inside(self) -> bool:
        """True if the trial that it started last has no finding yet."""
        lines = self._lines()
        return not lines or "begin" in lines[-1]

    def text(self) -> str:
        """The end of its output."""
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return " | ".join(lines)[-_TEXT:]

    def kill(self) -> bool:
        """Kill the process and its children; True if it has ended."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # a process inside a driver call may not die
            self._process.wait(_GRACE)
        return self.status is not None

    def _lines(self) -> list[dict[str, Any]]:
        complete = self._results.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in complete.splitlines()]


def watch(children: Sequence[Child], limit: float) -> str | None:
    """Wait until all processes have ended, and kill those that hang.

    Args:
        children: processes that work together.
        limit: seconds without progress of any of them.

    Returns:
        Description of a hang; ``None`` if all processes ended by themselves.
    """
    progress, since = [child.progress for child in children], time.monotonic()
    while any(child.status is None for child in children):
        time.sleep(_EVERY)
        now = [child.progress for child in children]
        if now != progress:
            progress, since = now, time.monotonic()
        allowed = min(limit, _GRACE) if any(child.status for child in children) else limit
        if time.monotonic() - since > allowed:
            ended = [child.kill() for child in children if child.status is None]
            stuck = "" if all(ended) else "; it could not be killed: its device stays taken until the driver lets go"
            return f"hung: nothing in {allowed:.0f} s, so it was killed{stuck}"
    return None


def ending(child: Child) -> str:
    """Describe the end of a process that has failed."""
    status = child.status
    if status is None:
        return "still runs"
    if status < 0:
        return f"died of {signal.Signals(-status).name}: {child.text()}"
    return f"ended with status {status}: {child.text()}"
