"""Plain forms of objects that users keep in hyper-parameters and callbacks, so that a checkpoint can hold them."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import uuid
from argparse import Namespace
from collections.abc import Mapping, Sequence, Set
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from lightning_megatron.checkpoint.formats.meta import is_plain


def plain(value: Any) -> Any:
    """Convert everything in a value that has an obvious plain form to that form.

    Paths and UUIDs become strings, dates and times ISO strings, a ``timedelta`` its seconds, numbers of NumPy Python's,
    arrays tensors, members of an ``Enum`` their values, data classes and namespaces dicts, other mappings, sequences
    and sets ``dict``, ``list``, ``tuple`` and ``set``. Plain values, and values without such a form, are kept.
    """
    if is_plain(value):
        return value
    if isinstance(value, enum.Enum):
        inner = plain(value.value)
        return inner if is_plain(inner) else value.name
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy()) if value.dtype.kind in "biufc" else plain(value.tolist())
    if isinstance(value, PurePath | uuid.UUID):
        return str(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Namespace | SimpleNamespace):
        return plain(dict(vars(value)))
    return _plain_container(value)


def _plain_container(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {plain(key): plain(child) for key, child in value.items()}
    if isinstance(value, Set):
        return {plain(child) for child in value}
    if isinstance(value, tuple):
        return tuple(plain(child) for child in value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(child) for child in value]
    return value
