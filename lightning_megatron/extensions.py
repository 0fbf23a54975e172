"""Parts that a run uses without importing them: they are looked up by name when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Any

EXTENSIONS: Mapping[str, str] = {"memory forecast": "lightning_megatron.tools.forecast:forecast_of"}
"""Functions by what they are for, each as ``module:name``."""

FAMILIES: Sequence[str] = ("lightning_megatron.encoders.bert.family:FAMILY", "lightning_megatron.encoders.t5.family:FAMILY")
"""Model families outside of ``families/``, each as ``module:name``."""

FAMILY_GROUP = "lightning_megatron.families"
"""Group of the entry points by which other packages add families."""


def extension(purpose: str) -> Callable[..., Any]:
    """The function for a purpose in :data:`EXTENSIONS`, whose module is imported now."""
    found: Callable[..., Any] = resolve_name(EXTENSIONS[purpose])
    return found


def further_families() -> list[Any]:
    """The families of :data:`FAMILIES`, and those of installed packages; their modules are imported now."""
    return [resolve_name(name) for name in FAMILIES] + [each.load() for each in entry_points(group=FAMILY_GROUP)]
