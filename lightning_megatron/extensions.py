"""Parts of the package that a run uses without importing them: they are looked up by name when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Any

EXTENSIONS: Mapping[str, str] = {"memory forecast": "lightning_megatron.tools.forecast:forecast_of"}
"""Functions by what they are for, each as ``module:name``."""


def extension(purpose: str) -> Callable[..., Any]:
    """The function for a purpose in :data:`EXTENSIONS`, whose module is imported now."""
    found: Callable[..., Any] = resolve_name(EXTENSIONS[purpose])
    return found
