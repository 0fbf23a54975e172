"""A terminal for tests: a pseudo-terminal of some size, and the rows that somebody in front of it has seen."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Callable, Mapping, Sequence

ROWS = 200
"""Rows of the terminal: enough that nothing scrolls out of it."""
_PART = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|(\r|\n)|(.)", re.DOTALL)


def run(
    command: Sequence[str], columns: int, environment: Mapping[str, str], answer: Callable[[str], str] = lambda text: ""
) -> tuple[int, str]:
    """Run a command in a terminal; returns its status and everything that it has written.

    Args:
        command: program and words.
        columns: width of the terminal.
        environment: environment variables.
        answer: function that gives the keys that are pressed when the output so far is seen.
    """
    keyboard, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    process = subprocess.Popen(
        [*command],
        env={**environment, "TERM": "xterm"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(terminal)
    said = b""
    try:
        while True:
            try:
                part = os.read(keyboard, 65536)
            except OSError:  # the last process with the terminal has ended
                break
            said += part
            if keys := answer(said.decode(errors="replace")):
                os.write(keyboard, keys.encode())
        return process.wait(), said.decode(errors="replace")
    finally:
        process.kill()
        process.wait()
        os.close(keyboard)


def screen(said: str, columns: int) -> list[str]:
    """The rows of a terminal after some output: what was overwritten is gone."""
    rows, row, column = [[" "] * columns], 0, 0
    for number, command, moves, letter in (match.groups() for match in _PART.finditer(said)):
        if letter and letter >= " ":
            if column == columns:
                row, column = row + 1, 0
            while len(rows) <= row:
                rows.append([" "] * columns)
            rows[row][column] = letter
            column += 1
        elif moves == "\r":
            column = 0
        elif moves == "\n":
            row += 1
        elif command in ("A", "B"):
            row = max(0, row + (-1 if command == "A" else 1) * int(number or 1))
        elif command == "G":
            column = int(number or 1) - 1
        elif command == "K":
            while len(rows) <= row:
                rows.append([" "] * columns)
            rows[row][slice(0, columns) if number == "2" else slice(column, columns)] = [" "] * (
                columns if number == "2" else columns - column
            )
    return ["".join(each).rstrip() for each in rows]
