"""Parts that several commands share: sizes in bytes, and an end from outside that clears what was begun."""

from __future__ import annotations

import argparse
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIGNALS = [number for name in ("SIGTERM", "SIGHUP") if (number := getattr(signal, name, None)) is not None]


def size_in_bytes(text: str) -> int:
    """Bytes of a text such as ``500MB`` or ``5GB``.

    Raises:
        argparse.ArgumentTypeError: for anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B|)", text.strip().upper())
    size = 0 if match is None else int(float(match[1]) * _UNITS[match[2]])
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 500MB or 5GB")
    return size


@contextmanager
def ending_by_signal() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as Ctrl-C does: through every ``finally``, with 128 + the signal's number.

    A signal that is ignored or has a handler stays with that, and so do all of them outside the main thread.
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
