"""A process that trains one round of steps on each command, and the reports of its rounds."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

MARK = "ROUND "
LAST_WORDS = 4000  # characters


class ContestantError(RuntimeError):
    """A contestant ended without a report."""


class Contestant:
    """A process that speaks the protocol of ``peers/protocol.py``.

    Args:
        name: name in tables.
        command: words that start the process.
        environment: variables besides those of this process.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self.rounds: list[dict[str, Any]] = []
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - open as long as the process
        self._process = subprocess.Popen(
            command,
            cwd=Path(__file__).parent,  # Python looks there before the path: never at the caller's checkout
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false", **environment},
            start_new_session=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def run(self, word: str = "go", seconds: float | None = None) -> None:
        """Train one round.

        Args:
            word: "go", or "profile" to have the round's operators reported too.
            seconds: limit; ``None`` for none.

        Raises:
            ContestantError: if the process ends instead, or needs longer, with the end of its output.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has died: its last words follow below
            self._process.stdin.write(f"{word}\n")
            self._process.stdin.flush()
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise ContestantError(self._ended(f"no report after {seconds:.0f} seconds")) from None
        if line is None:
            raise ContestantError(self._ended(f"ended with exit code {self._process.wait()}"))
        self.rounds.append(json.loads(line.removeprefix(MARK)))

    def stop(self) -> None:
        """End the process and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._errors.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                self._lines.put(line)
        self._lines.put(None)

    def _ended(self, how: str) -> str:
        """A sentence with the last line that the process has printed, and below it the lines before."""
        self._errors.seek(0)
        words = self._errors.read()[-LAST_WORDS:].strip()
        return f"{self.name}: {how}: {words.splitlines()[-1] if words else 'it said nothing'}\n{words}"
