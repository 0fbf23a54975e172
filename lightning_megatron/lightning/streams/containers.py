"""Containers of a batch, opened and rebuilt: mappings, sequences, dataclasses and objects with ``to``."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def entries_of(value: Any, name: str = "") -> list[tuple[str, Any, Any]] | None:
    """Names (which begin with ``name``), keys and values of a container's entries; ``None`` for anything else."""
    if isinstance(value, Tensor | str | bytes | range):
        return None
    if _has_attributes(value):
        items = (
            vars(value)
            if not is_dataclass(value)
            else {field.name: getattr(value, field.name) for field in fields(value)}
        )
        data = "data" if isinstance(value, UserDict) else None
        return [(name if key == data else f"{name}.{key}", key, item) for key, item in items.items()]
    if isinstance(value, Mapping):
        return [(f"{name}[{key!r}]", key, item) for key, item in value.items()]
    if isinstance(value, Sequence):
        keys = getattr(value, "_fields", range(len(value)))
        return [
            (f"{name}[{key}]" if isinstance(key, int) else f"{name}.{key}", key, item)
            for key, item in zip(keys, value, strict=True)
        ]
    return None


def with_values(value: Any, values: Sequence[Any]) -> Any:
    """A container of the same type and keys as ``value``, with other values, in the order of :func:`entries_of`."""
    if isinstance(value, Sequence):
        return sequence_like(value, values)
    keys = [key for _, key, _ in entries_of(value) or ()]
    if type(value) is dict or not (_has_attributes(value) or isinstance(value, MutableMapping)):
        rebuilt = dict(zip(keys, values, strict=True))
        return rebuilt if type(value) is dict else type(value)(rebuilt)
    rebuilt = copy(value)
    for key, item in zip(keys, values, strict=True):
        if _has_attributes(value):
            object.__setattr__(rebuilt, key, item)
        else:
            rebuilt[key] = item
    return rebuilt


def sequence_like(value: Any, items: Sequence[Any]) -> Any:
    """A sequence of the type of ``value`` with these items."""
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def is_ordered(value: Any) -> bool:
    """True for a list or a tuple without names, which holds either fields or samples."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | range) and not hasattr(value, "_fields")


def _has_attributes(value: Any) -> bool:
    """True for a dataclass, a ``UserDict`` (of Hugging Face), and what Lightning moves by its own ``to``."""
    if isinstance(value, type | Tensor | Sequence) or (isinstance(value, Mapping) and not isinstance(value, UserDict)):
        return False
    if is_dataclass(value) or isinstance(value, UserDict):
        return True
    return hasattr(value, "to") and hasattr(value, "__dict__") and not hasattr(value, "__len__")
