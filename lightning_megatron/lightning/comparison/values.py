"""Conversion of any setting to plain values that can be compared across processes."""

from __future__ import annotations

import hashlib
import inspect
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from datetime import timedelta
from enum import Enum
from functools import partial
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

Plain = None | bool | int | float | str
Facts = dict[str, Plain]
"""Plain values by dotted names: ``{"config.num_layers": 2}``."""

NOTHING = "(nothing)"
_DEEPEST = 6
_LONGEST_LIST = 64


def flat(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Plain]]:
    """Flatten a value to plain values with dotted names; an object without plain content becomes its class's name."""
    if value is None or isinstance(value, bool | int | float | str):
        yield name, _scalar(value)
    elif depth > _DEEPEST or isinstance(value, nn.Module):
        yield name, _name_of(type(value))
    elif (contents := _contents(value)) is not None:
        yield from _entries(name, contents, depth)
    elif isinstance(value, list | tuple | set | frozenset):
        yield from _items(name, value, depth)
    elif isinstance(value, torch.Tensor | np.ndarray):
        yield name, f"{type(value).__name__} {list(value.shape)} {value.dtype}"
    elif inspect.isroutine(value) or isinstance(value, type):
        yield name, _name_of(value)
    elif isinstance(value, Enum | PurePath | timedelta | torch.dtype | bytes):
        yield name, str(value)
    elif isinstance(value, torch.device):
        yield name, value.type
    elif isinstance(value, np.generic):
        yield name, _scalar(value.item())
    else:
        yield name, _name_of(type(value))
        yield from _entries(name, constructor_values(value), depth)


def constructor_values(instance: object) -> dict[str, Any]:
    """Arguments of an instance's constructor, as far as it keeps them under their names (or with an underscore)."""
    try:
        names = inspect.signature(type(instance).__init__).parameters
        kept = vars(instance)
    except (TypeError, ValueError):  # of a class written in C, or with slots
        return {}
    under = {name: name if name in kept else f"_{name}" for name in names if name != "self"}
    return {name: kept[key] for name, key in under.items() if key in kept}


def digest_of(text: str) -> str:
    """Short hash of a text."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _scalar(value: Any) -> Plain:
    """Convert a value to its built-in type; a subclass (an ``IntEnum``, a YAML library's text) loses its class."""
    kinds = (bool, int, float, str)
    return next((kind(value) for kind in kinds if isinstance(value, kind)), None)


def _contents(value: Any) -> Mapping[str, Any] | None:
    """Values under names in a mapping, a namespace, a dataclass or a partial function; ``None`` for anything else."""
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if isinstance(value, Namespace | SimpleNamespace):
        return vars(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, partial):
        return {"function": value.func, "args": value.args, **value.keywords}
    return None


def _entries(name: str, entries: Mapping[str, Any], depth: int) -> Iterator[tuple[str, Plain]]:
    for key, item in entries.items():
        yield from flat(f"{name}.{key}", item, depth + 1)


def _items(name: str, items: Any, depth: int) -> Iterator[tuple[str, Plain]]:
    listed = sorted(items, key=repr) if isinstance(items, set | frozenset) else list(items)
    if all(item is None or isinstance(item, bool | int | float | str) for item in listed):
        text = str(listed)
        yield name, text if len(listed) <= _LONGEST_LIST else f"{len(listed)} entries, {digest_of(text)}"
        return
    inside = [pair for number, item in enumerate(listed) for pair in flat(f"{name}.{number}", item, depth + 1)]
    if len(listed) <= _LONGEST_LIST:
        yield from inside
    else:
        yield name, f"{len(listed)} entries, {digest_of(str(inside))}"


def _name_of(named: Any) -> str:
    return f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', named)}"
