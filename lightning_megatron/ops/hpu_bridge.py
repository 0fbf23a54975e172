"""Intel's bridge to the Gaudi, asked for one thing at a time; nothing of it is imported before somebody asks."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

_PACKAGE = "habana_frameworks"


def lacks(module: str, name: str) -> str | None:
    """Why ``habana_frameworks.torch.<module>`` cannot give ``name``; ``None`` if it can."""
    if importlib.util.find_spec(_PACKAGE) is None:
        return f"{_PACKAGE} is not installed"
    try:
        found = import_module(f"{_PACKAGE}.torch.{module}")
    except ImportError as error:
        return f"{_PACKAGE} cannot be imported: {error}"
    return None if hasattr(found, name) else f"{_PACKAGE}.torch.{module} has no {name}"


def needs(module: str, name: str) -> Callable[[], str | None]:
    """:func:`lacks` for later."""
    return partial(lacks, module, name)


def bridge(module: str, name: str) -> Any:
    """``habana_frameworks.torch.<module>.<name>``."""
    return getattr(import_module(f"{_PACKAGE}.torch.{module}"), name)
