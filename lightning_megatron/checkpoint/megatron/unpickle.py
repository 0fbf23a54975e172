"""Read pickled files of another program without importing it, and without calling anything that a file names.

Megatron stores its command line beside the weights, as an ``argparse.Namespace`` that holds enumerations and functions
of its own. Here only names of a short list are looked up, those of which tensors, containers and DCP's metadata are
made; every other one becomes a class whose objects keep what they are given and do nothing.
"""

from __future__ import annotations

import argparse
import pickle
import zipfile
from collections import OrderedDict
from dataclasses import is_dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from lightning_megatron.checkpoint.together import CheckpointError

_PLAIN = {
    ("argparse", "Namespace"): argparse.Namespace,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
}
# What torch itself lets pass with weights_only=True; the names are part of its file format.
_REBUILD = {
    ("torch._utils", name)
    for name in ("_rebuild_tensor_v2", "_rebuild_parameter", "_rebuild_parameter_with_state", "_rebuild_tensor")
} | {("torch.serialization", "_get_layout")}
_DCP = "torch.distributed.checkpoint."


class StandIn:
    """An object of a class that was not looked up.

    Attributes:
        given: what it was made of.
        state: what it was filled with.
    """

    def __init__(self, *given: Any) -> None:
        self.given = given
        self.state: list[Any] = []

    def __setstate__(self, state: Any) -> None:
        self.state.append(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.state.append((key, value))

    def append(self, value: Any) -> None:
        """As a list is filled."""
        self.state.append(value)

    def __call__(self, *given: Any) -> StandIn:
        """As a function is called that another object stands for."""
        return StandIn(self, *given)

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"{type(self).__module__}.{type(self).__qualname__}{self.given!r}"


class InertUnpickler(pickle.Unpickler):
    """Looks up nothing that is not on the list."""

    def find_class(self, module: str, name: str) -> Any:
        """The thing of that name, or a stand-in."""
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if (module, name) in _REBUILD:
            return getattr(import_module(module), name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.startswith(_DCP) and _is_record(found := getattr(import_module(module), name, None)):
            return found
        return type(name, (StandIn,), {"__module__": module})


def _is_record(found: Any) -> bool:
    return isinstance(found, type) and (is_dataclass(found) or issubclass(found, Enum))


class _Pickle:
    """What ``torch.load`` asks of a pickle module."""

    Unpickler = InertUnpickler

    @staticmethod
    def load(file: Any, **options: Any) -> Any:
        return InertUnpickler(file, **options).load()


def load_file(file: Path, *, allow_pickle: bool) -> Any:
    """What ``torch.save`` wrote; tensors are mapped, and read when they are used.

    Args:
        file: the file.
        allow_pickle: read also what is not only primitives, containers and tensors, with stand-ins for the rest.

    Raises:
        CheckpointError: if it is no such file, or holds objects and ``allow_pickle`` is not set.
    """
    mapped: Any = {"map_location": "cpu", "mmap": zipfile.is_zipfile(file)}
    try:
        if not allow_pickle:
            return torch.load(file, weights_only=True, **mapped)
        return torch.load(file, weights_only=False, pickle_module=_Pickle, **mapped)
    except pickle.UnpicklingError as error:
        if allow_pickle:
            raise CheckpointError(f"{file}: cannot be read: {error}") from None
        raise CheckpointError(
            f"{file} holds objects beside primitives and tensors, as all files of Megatron with its command line do. If"
            " you trust where it comes from, convert it with `lightning-megatron convert megatron-to-ckpt` and"
            " --allow-pickle: nothing that it names is run, but it is a pickle"
        ) from None
    except (RuntimeError, OSError, EOFError) as error:
        raise CheckpointError(f"{file}: missing, truncated or no file of torch.save: {error}") from None
