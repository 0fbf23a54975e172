"""Signals that ask a run to end: noted while there is something to save; before and after, they end it at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import FrameType
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from lightning_megatron.errors import Problem, nearest_names

Handler = Callable[[int, FrameType | None], Any] | int | None

SAME_PRESS = 1.0
"""Seconds within which a second SIGINT counts as the first: a launcher forwards the one that a terminal sent to all."""

LATE = 1.0
"""Seconds by which a signal may reach one rank later than another."""


def signal_problems(names: Sequence[str]) -> list[Problem]:
    """The faults of names that are signals on no system."""
    known = {*(number.name for number in signal.Signals), "SIGUSR1", "SIGUSR2", "SIGHUP"}  # not every system has these
    unknown = (name for name in names if name not in known)
    return [Problem("signals", name, "no signal", nearest_names(name, sorted(known))) for name in unknown]


class StopSignals:
    """Handlers that do nothing but note a signal, since they may run in the middle of a collective.

    SIGTERM is always handled, and a handler of the user's own runs first. Other signals are left alone if they
    have a handler that is neither Python's default nor Lightning's, or were ignored when the process began; those of
    :meth:`add` are handled even if they were ignored.

    Attributes:
        noted: numbers of the signals received.
        waits: True to note a signal; False to let it end this process, and those that it has launched, at once.
    """

    def __init__(self, names: Sequence[str]) -> None:
        known = [getattr(signal, name, None) for name in names]  # not every system has SIGUSR1
        self._numbers: list[int] = [int(number) for number in known if number is not None]
        self._added: set[int] = set()
        self._before: dict[int, Handler] = {}
        self._first: float | None = None
        self._kill_children: Callable[[int], None] = _nothing_launched
        self._users: Handler = None
        self.noted: list[int] = []
        self.waits = False

    @property
    def are_heard(self) -> bool:
        """True if the handlers are in place."""
        return bool(self._before)

    def add(self, number: int) -> None:
        """Add a signal, from the next :meth:`listen` on, also if this process was started with it ignored.

        Scripts ignore the requeue signal so that ``torchrun`` survives it, and its processes inherit that.
        """
        self._added.add(number)
        if number not in self._numbers:
            self._numbers.append(number)

    def look(self) -> None:
        """Note the handler of SIGTERM, before Lightning wraps it."""
        before = signal.getsignal(signal.SIGTERM)
        self._users = None if _is_nobodys(before) else before

    def listen(self, kill_children: Callable[[int], None] | None = None) -> None:
        """Set the handlers, in the main thread, if they are not set; Python allows no other thread to do so.

        Args:
            kill_children: function that sends a signal to the processes that this one has launched.
        """
        if self.are_heard or threading.current_thread() is not threading.main_thread():
            return
        self.noted, self.waits, self._first = [], False, None
        self._kill_children = kill_children or _nothing_launched
        for number in self._numbers:
            before = signal.getsignal(number)
            is_free = _is_nobodys(before) or (number in self._added and before == signal.SIG_IGN)
            if number != signal.SIGTERM and not is_free:
                rank_zero_info(f"{signal.Signals(number).name} is left to its present handler")
                continue
            self._before[number] = before
            signal.signal(number, self._note)

    def await_own(self, seconds: float = LATE) -> None:
        """Wait for the signal that other ranks have received: it would kill a process without these handlers."""
        end = time.monotonic() + seconds
        while self.are_heard and not self.noted and time.monotonic() < end:
            time.sleep(0.01)

    def give_back(self) -> None:
        """Restore the previous handlers."""
        while self._before:
            number, before = self._before.popitem()
            signal.signal(number, signal.SIG_DFL if before is None else before)
        self.waits = False

    def __deepcopy__(self, memo: dict[int, Any]) -> StopSignals:
        return self  # handlers belong to the process

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        again = number == signal.SIGINT and self._first is not None and now - self._first > SAME_PRESS
        if number == signal.SIGTERM and callable(self._users):
            self._users(number, frame)
        if again or not self.waits:
            self._kill_children(signal.SIGKILL if again else number)
            end_at_once(number)
        if number == signal.SIGINT and self._first is None:
            self._first = now
        self.noted.append(number)


def end_at_once(number: int) -> None:
    """Kill this process by a signal, so that its status shows it; SIGINT only interrupts an interactive session."""
    if number == signal.SIGINT and hasattr(sys, "ps1"):
        raise KeyboardInterrupt
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def handed_on(kill_children: Callable[[int], None]) -> AbstractContextManager[Any]:
    """Forward SIGTERM to a launcher's processes in this context, unless it has a handler."""
    stack = ExitStack()
    before = signal.getsignal(signal.SIGTERM)
    if before == signal.SIG_DFL and threading.current_thread() is threading.main_thread():

        def hand_on(number: int, frame: FrameType | None) -> None:
            kill_children(number)
            end_at_once(number)

        signal.signal(signal.SIGTERM, hand_on)
        stack.callback(signal.signal, signal.SIGTERM, before)
    return stack


def _is_nobodys(handler: Handler) -> bool:
    """True if a handler is Python's, Lightning's or ours, and may be replaced; ``None`` was not set from Python."""
    if handler in (signal.SIG_DFL, signal.default_int_handler):
        return True
    return getattr(handler, "__module__", "").startswith(("lightning.", "lightning_megatron."))


def _nothing_launched(number: int) -> None: ...
