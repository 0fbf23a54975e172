"""Shared parts of the commands: parsers, error lines, exit statuses, sizes in bytes, signals."""

from __future__ import annotations

import argparse
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from shutil import get_terminal_size
from textwrap import fill
from types import FrameType
from typing import NoReturn

from lightning_megatron.errors import ConfigError, Problem
from lightning_megatron.machine.byte_size import parse_bytes

_SIGNALS = [number for name in ("SIGTERM", "SIGHUP") if (number := getattr(signal, name, None)) is not None]


class _BriefParser(argparse.ArgumentParser):
    """A parser whose errors are one line, without its usage."""

    def error(self, message: str) -> NoReturn:
        """Print an error and exit with status 2."""
        raise SystemExit(fail(message))


def command_parser(
    name: str, description: str, examples: str | None = None, *, brief_errors: bool = False
) -> argparse.ArgumentParser:
    """An empty parser for one command.

    Args:
        name: name of the command.
        description: text of its help.
        examples: text at the end of its help; lines that begin with blanks are commands.
        brief_errors: True to print an error without the usage.
    """
    parser = _BriefParser if brief_errors else argparse.ArgumentParser
    return parser(
        prog=f"lightning-megatron {name}",
        description=_wrapped(description),
        epilog=None if examples is None else _wrapped(examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _wrapped(text: str) -> str:
    """A text whose lines fit into the terminal: paragraphs are filled, indented commands go on behind a backslash."""
    width = min(get_terminal_size().columns, 122) - 2
    filled = partial(fill, break_long_words=False, break_on_hyphens=False)

    def command(line: re.Match[str]) -> str:
        quoted = re.sub("'[^']*'", lambda found: found[0].replace(" ", "\0"), line[0])  # is not broken
        return filled(quoted, width - 2, subsequent_indent=" " * 6).replace("\n", " \\\n").replace("\0", " ")

    text = re.sub(r"^\S.*(\n\S.*)*", lambda found: filled(found[0], width), text, flags=re.MULTILINE)
    return re.sub(r"^ +\S.*", command, text, flags=re.MULTILINE)


def fail(text: object) -> int:
    """Print the error line of a command; returns 2, the exit status for a user's error."""
    print(f"error: {text}", file=sys.stderr)
    return 2


def exit_status(work: Callable[[], int], *errors: type[Exception], text: Callable[[Exception], str] = str) -> int:
    """Run a command's work; returns its exit status, or 2 after printing an error that the user can fix.

    Args:
        work: function that returns an exit status.
        *errors: types of errors that the user can fix. Others are raised.
        text: function that returns the text of an error.
    """
    try:
        return work()
    except BrokenPipeError:  # an OSError that is no fault: ``| head`` has read enough
        raise
    except errors as error:
        return fail(text(error))


def print_text(make: Callable[[], str | None]) -> int:
    """Print the text that a function of a checkpoint returns, if it returns one; returns the exit status.

    Args:
        make: function that returns the text; ``None`` in a process that the first one has started.
    """
    from lightning.fabric.utilities.exceptions import MisconfigurationException  # takes seconds: not for --help

    from lightning_megatron.checkpoint import CheckpointError

    def work() -> int:
        text = make()
        if text is not None:
            print(text)
        return 0

    return exit_status(work, ValueError, OSError, ModuleNotFoundError, CheckpointError, MisconfigurationException)


def one_line(error: Exception) -> str:
    """The text of an error without line breaks."""
    return " ".join(str(error).split())


def named_by_options(options: Mapping[str, str], error: Exception) -> str:
    """The text of an error, with arguments named by their options."""
    if not isinstance(error, ConfigError):
        return str(error)
    return str(
        ConfigError(replace(each, argument=options.get(each.argument, each.argument)) for each in error.problems)
    )


def below_one(args: argparse.Namespace, *names: str) -> list[Problem]:
    """Problems of counts that are given and below 1."""
    return [
        Problem(f"--{name.replace('_', '-')}", value, "must be at least 1", (1,))
        for name in names
        if (value := getattr(args, name)) is not None and value < 1
    ]


def size_in_bytes(text: str) -> int:
    """Bytes of a text such as ``500MB`` or ``5GB``.

    Raises:
        argparse.ArgumentTypeError: for anything else.
    """
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


@contextmanager
def ending_by_signal() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as Ctrl-C does: through every ``finally``, with 128 + the signal's number.

    A signal that is ignored or has a handler is left alone; outside the main thread all signals are.
    """
    is_main = threading.current_thread() is threading.main_thread()
    ours = [number for number in _SIGNALS if is_main and signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _leave)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
