"""Facts about the card that the rules are tried on, real or simulated, and comparisons that tell what they have found.

A deviation of the simulation is a fault of ours: the test fails. A refusal that a real card does not give, or gives
with other words, is an expected failure, whose reason says what came; it is written into the report.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from typing import Any

import pytest
import simulated_gaudi as hpu
import torch
from simulated_gaudi.rules import BRIDGE, SIMULATION
from torch import Tensor

SIMULATED = hpu.enabled()
simulation = getattr(pytest.mark, SIMULATION)
"""Mark of what cannot be asked of a real card."""


@dataclass(frozen=True)
class Product:
    """Facts about a generation of cards, from its documents; none was measured.

    Attributes:
        memory: bytes of a card.
        largest_e4m3: largest value of its E4M3.
        multiplies_two_formats: true if an fp8 product may have operands of two formats.
        tolerance: of fused kernels against fp32 on the host, by dtype.
        rounding: of torch's own operations against the host's, by dtype.
    """

    memory: int
    largest_e4m3: float
    multiplies_two_formats: bool
    tolerance: dict[torch.dtype, float]
    rounding: dict[torch.dtype, float]


BRIDGES = {torch.float32: 1e-3, torch.bfloat16: 0.08}
"""Tolerances of the bridge's own tests."""
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.04}
PRODUCTS = {
    "GAUDI2": Product(96 * 2**30, 240.0, False, BRIDGES, ROUNDING),
    "GAUDI3": Product(128 * 2**30, 448.0, True, BRIDGES, ROUNDING),
}


def nearest(release: str, known: Sequence[str] = hpu.PROFILES) -> str:
    """The newest version whose rules are known and that is no newer than a release; the oldest for older ones.

    Args:
        release: such as ``1.24.1.2``.
        known: versions, from the oldest.
    """
    wanted = tuple(map(int, release.split("+")[0].split(".")[:2]))
    return [known[0], *(name for name in known if tuple(map(int, name.split("."))) <= wanted)][-1]


@lru_cache(maxsize=1)
def profile() -> str:
    """Version whose rules hold here: of the simulation, or of the installed bridge."""
    if SIMULATED:
        return str(importlib.import_module("simulated_hpu.settings").settings().profile)
    return nearest(version(BRIDGE))


@lru_cache(maxsize=1)
def product() -> Product:
    """The card of this process; a new one is taken for the newest that is known. It acquires the card."""
    return PRODUCTS.get(torch.hpu.get_device_name(), PRODUCTS["GAUDI3"])


OLD = profile() == "1.19"
"""True for the version with few keywords, no mean in HCCL and no gradient of experts."""

# What a rule has found, for the report

_NOTES: ContextVar[dict[str, Any]] = ContextVar("notes")


@contextmanager
def notes() -> Iterator[dict[str, Any]]:
    """Notes of a rule."""
    token = _NOTES.set({})
    try:
        yield _NOTES.get()
    finally:
        _NOTES.reset(token)


def note(name: str, value: Any) -> None:
    """Keep a measured value for the report; no effect in other processes than the one that tries the rule."""
    found = _NOTES.get({})
    number = 1 + sum(key.partition(" #")[0] == name for key in found)
    found[name if number == 1 else f"{name} #{number}"] = value


def _expects(text: str) -> None:
    _NOTES.get({})["expected"] = text  # of several refusals the last one: no other is tried after a deviation


# Comparisons


def close(ours: Tensor, right: Tensor, tolerance: float) -> None:
    """Compare a result of the card with one of the host, and note the largest difference."""
    ours, right = ours.detach().float().cpu(), right.detach().float().cpu()
    if ours.shape == right.shape and ours.numel():
        note("largest difference", float((ours - right).abs().max()))
    torch.testing.assert_close(ours, right, atol=tolerance, rtol=tolerance)


def same(ours: Tensor, right: Tensor) -> None:
    """Compare to the bit on the simulation, up to the card's rounding on a real one."""
    if SIMULATED:
        assert torch.equal(ours, right)
    elif right.is_floating_point():
        assert ours.dtype == right.dtype
        close(ours, right, product().rounding.get(right.dtype, 0.1))
    else:
        torch.testing.assert_close(ours, right)


def approximately(right: Any, tolerance: float) -> Any:
    """Equal on the simulation, and within a relative tolerance on a real card.

    Args:
        right: number or list of numbers.
        tolerance: relative.
    """
    return right if SIMULATED else pytest.approx(right, rel=tolerance)


def assert_calls(expected: dict[str, int]) -> None:
    """The operators that were called since :func:`reset_calls`; a real card does not count them."""
    if SIMULATED:
        assert hpu.calls() == Counter(expected)


def reset_calls() -> None:
    """Count from zero."""
    if SIMULATED:
        hpu.reset_calls()


# Refusals


@contextmanager
def refuses(error: type[Exception] | tuple[type[Exception], ...], match: str = "") -> Iterator[None]:
    """A block that the software must refuse.

    Args:
        error: class of the error.
        match: pattern that its text must contain.
    """
    if SIMULATED:
        with pytest.raises(error, match=match or None):
            yield
        return
    classes = error if isinstance(error, tuple) else (error,)
    _expects(f"refused with {' or '.join(each.__name__ for each in classes)}: {match}")
    try:
        yield
    except Exception as other:
        if isinstance(other, classes) and re.search(match, str(other)):
            return
        pytest.xfail(f"refused with {type(other).__name__}: {other}")
    pytest.xfail("not refused")


NOT_REFUSED = "not refused"


def refusal(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The error of a call, for :func:`assert_refusal` in another process."""
    try:
        found = function(*args, **kwargs)
    except Exception as error:
        return str(error)
    return f"{NOT_REFUSED}: {found!r}"


def assert_refusal(said: str, expected: str) -> None:
    """Compare a :func:`refusal` with a part of the expected text."""
    _expects(f"refused: {expected}")
    if expected in said:
        return
    if SIMULATED:
        raise AssertionError(f"{said!r} does not contain {expected!r}")
    pytest.xfail(said if said.startswith(NOT_REFUSED) else f"refused: {said}")
