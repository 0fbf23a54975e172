"""Marking steps: in lazy mode this runs the collected closures, in eager mode it also warns once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from simulated_hpu import calls
from simulated_hpu.settings import settings

_closures: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
_warned: set[str] = set()


def mark_step(device_str: str = "", sync: bool = False) -> None:
    """End a step."""
    calls.count("mark_step")
    if not settings().is_lazy and "mark_step" not in _warned:
        _warned.add("mark_step")
        warnings.warn("mark_step does nothing in eager mode", stacklevel=2)
    pending, _closures[:] = list(_closures), []
    for closure, args in pending:
        closure(*args)


def _mark_step_if_lazy(device_str: str = "") -> None:
    if settings().is_lazy:
        mark_step(device_str)


def iter_mark_step(device_str: str = "") -> None:
    """End a step at the end of an iteration."""
    mark_step(device_str)


def add_step_closure(closure: Callable[..., Any], args: tuple[Any, ...] = ()) -> None:
    """Call ``closure(*args)`` when the step ends."""
    _closures.append((closure, args))
