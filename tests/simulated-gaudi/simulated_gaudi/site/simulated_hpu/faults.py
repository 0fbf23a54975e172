"""Operators and collectives that fail on purpose, for tests of programs that look for such faults."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from simulated_hpu.settings import settings


def before(name: str) -> None:
    """End or stop this process at an operator, if ``die:name`` or ``hang:name`` is simulated."""
    if f"die:{name}" in settings().faults:
        os.abort()
    while f"hang:{name}" in settings().faults:
        time.sleep(1)


def after(name: str, result: Any) -> Any:
    """The result of an operator; with ``wrong:name`` its first tensor has every other element negated."""
    if result is None or f"wrong:{name}" not in settings().faults:
        return result
    first, *rest = result if isinstance(result, tuple) else (result,)
    wrong = first * torch.where(torch.arange(first.shape[-1], device=first.device) % 2 == 0, 1.0, -1.0).to(first.dtype)
    return (wrong, *rest) if isinstance(result, tuple) else wrong
