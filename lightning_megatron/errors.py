"""Errors that a user can meet, with the nearest valid values.

A check of a configuration does not stop at the first fault: it returns every :class:`Problem` it finds, and one
:class:`ConfigError` shows them all.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType

_log = logging.getLogger(__name__)
_LIBRARIES = ("lightning_megatron", "lightning", "pytorch_lightning", "torch", "contextlib")


@dataclass(frozen=True)
class Problem:
    """One fault in a configuration.

    Attributes:
        argument: name of the argument as the user writes it (``"tp"``, ``"micro_batch_size"``).
        value: value of the argument.
        reason: reason why the value is invalid, with the numbers that conflict.
        nearest: nearest valid values, closest first; empty if they are not known.
    """

    argument: str
    value: object
    reason: str
    nearest: tuple[object, ...] = ()

    def __str__(self) -> str:
        text = f"{self.argument}={self.value!r}: {self.reason}"
        return f"{text}; nearest valid: {', '.join(map(str, self.nearest))}" if self.nearest else text


class ConfigError(ValueError):
    """All faults of a configuration at once.

    Attributes:
        problems: the faults, in the order they were found.
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__(f"{count} in the configuration:\n" + "\n".join(f"  - {p}" for p in self.problems))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.problems,)  # pickling passes an exception's arguments to its constructor


def raise_if_any(problems: Iterable[Problem]) -> None:
    """Raise one :class:`ConfigError` if there is any problem."""
    found = list(problems)
    if found:
        raise ConfigError(found)


def problems_of(function: Callable[..., object], *args: object) -> list[Problem]:
    """The problems that a call raises."""
    try:
        function(*args)
    except ConfigError as error:
        return list(error.problems)
    return []


def nearest_to(value: int, candidates: Iterable[int]) -> tuple[int, ...]:
    """The three candidates closest to ``value``, closest first."""
    return tuple(sorted(set(candidates), key=lambda c: (abs(c - value), c))[:3])


def multiples_around(value: int, step: int) -> tuple[int, ...]:
    """The multiples of ``step`` on both sides of ``value``, closest first, none below ``step``."""
    low = value // step * step
    return nearest_to(value, {max(low, step), low + step})


def is_whole(value: object, at_least: int) -> bool:
    """True if ``value`` is an ``int`` (not a ``bool``) and large enough."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def divisors(n: int) -> list[int]:
    """All positive divisors of ``n >= 1``, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def nearest_names(name: str, known: Sequence[str]) -> tuple[str, ...]:
    """Known names similar to a mistyped one; all of them if none is similar."""
    from difflib import get_close_matches

    return tuple(get_close_matches(name, known, n=3, cutoff=0.5)) or tuple(known)


def how_to_install(extra: str) -> str:
    """The command that installs an extra of this package. No registry holds the package, so it needs a clone."""
    return f"pip install '.[{extra}]' in a clone of lightning-megatron"


class DataError(ValueError):
    """Bad data. The text names the file, the line if known, the fault, and the remedy."""

    @classmethod
    def at(cls, path: str | Path, fault: str, *, line: int | None = None, do: str = "") -> DataError:
        """The error at a place in a file.

        Args:
            path: the file (or the prefix of a pair) at fault.
            fault: the fault, with its numbers.
            line: one-based line, for text files.
            do: remedy for the user.
        """
        place = f"{path}" if line is None else f"{path}, line {line}"
        return cls(f"{place}: {fault}; {do}" if do else f"{place}: {fault}")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved or loaded; the text has its path, the reason, and the remedy."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """There is nothing at the path of a checkpoint."""


def described(error: BaseException) -> str:
    """``ValueError: its text`` on one line; works even if ``str(error)`` raises."""
    try:
        text = str(error)
    except Exception as fault:
        text = f"its text cannot be made: {type(fault).__name__}"
    return " ".join(f"{type(error).__name__}: {text}".split())


def print_errors_briefly() -> None:
    """For uncaught errors of this package, let Python print only the user's stack frames: their text says the rest.

    A run sets ``is_printed_here`` on the error that ends it, of any class. True prints the user's frames, and for
    errors of other packages the frames below those; False prints nothing, since another rank prints the error.
    """
    sys.excepthook = partial(_print, sys.excepthook)


def _print(before: Callable[..., object], kind: object, error: BaseException, trace: TracebackType | None) -> None:
    is_ours = type(error).__module__.startswith("lightning_megatron.")
    is_here = getattr(error, "is_printed_here", is_ours or None)
    if is_here:
        _log.debug("the whole traceback:", exc_info=error)
        error.__traceback__ = trace = _of_user(trace, is_ours)
        if is_ours:
            error.__cause__ = None
    if is_here is not False:
        before(kind, error, trace)


def _of_user(trace: TracebackType | None, is_ours: bool) -> TracebackType | None:
    users, below = [], trace
    while trace is not None:
        if str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0] not in _LIBRARIES:
            users.append(trace)
            below = trace.tb_next
        trace = trace.tb_next
    kept = None if is_ours else below
    for user in reversed(users):
        kept = TracebackType(kept, user.tb_frame, user.tb_lasti, user.tb_lineno)
    return kept
