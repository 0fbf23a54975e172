"""Parts that a run uses without importing them: they are looked up by name when they are needed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from pkgutil import resolve_name
from typing import Any, Generic, TypeVar

EXTENSIONS: Mapping[str, str] = {"memory forecast": "lightning_megatron.tools.forecast:forecast_of"}
"""Functions by what they are for, each as ``module:name``."""

FAMILIES: Sequence[str] = (
    "lightning_megatron.encoders.bert.family:FAMILY",
    "lightning_megatron.encoders.t5.family:FAMILY",
)
"""Model families of this package outside of ``families/``, each as ``module:name``."""

FAMILY_GROUP = "lightning_megatron.families"
"""Group of the entry points with which other packages add families."""

_Value = TypeVar("_Value")


def extension(purpose: str) -> Callable[..., Any]:
    """The function for a purpose in :data:`EXTENSIONS`, whose module is imported now."""
    found: Callable[..., Any] = resolve_name(EXTENSIONS[purpose])
    return found


def further_families(kind: type[_Value]) -> list[_Value]:
    """Families of :data:`FAMILIES` and of other installed packages; their modules are imported now.

    A warning names each entry point of another package that does not load, or that is no family; it is left out.

    Args:
        kind: class of families.
    """
    found: list[_Value] = [resolve_name(name) for name in FAMILIES]
    for each in entry_points(group=FAMILY_GROUP):
        try:
            family = each.load()
        except Exception as error:  # a package may fail in any way when it is imported
            _warn_of(each, f"cannot be loaded ({type(error).__name__}: {error})")
            continue
        if isinstance(family, kind):
            found.append(family)
        else:
            _warn_of(each, f"is of {type(family).__name__}, not of {kind.__name__}")
    return found


def _warn_of(entry: EntryPoint, fault: str) -> None:
    package = "an unknown package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
    warnings.warn(
        f"the model family {entry.name!r} of {package} is left out: its entry point {entry.value!r} in the group "
        f"{FAMILY_GROUP!r} {fault}. Mend or uninstall the package",
        stacklevel=2,
    )


class LazyMapping(Mapping[str, _Value], Generic[_Value]):
    """A mapping whose contents are made at its first use.

    Args:
        make: function that makes them.
    """

    def __init__(self, make: Callable[[], Mapping[str, _Value]]) -> None:
        self._make = make

    @cached_property
    def _contents(self) -> Mapping[str, _Value]:
        return self._make()

    def __getitem__(self, name: str) -> _Value:
        return self._contents[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._contents)

    def __len__(self) -> int:
        return len(self._contents)
