"""Reader of Megatron's pickled files that imports nothing of it, and calls nothing that a file names.

Megatron stores its command line beside the weights, as an ``argparse.Namespace`` that holds enumerations and functions
of its own. torch's reader with ``weights_only=True`` takes tensors and containers; every other name in the file gets a
class whose objects keep their arguments and do nothing.
"""

from __future__ import annotations

import argparse
import pickle
import pickletools
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from lightning_megatron.checkpoint.integrity.unpacked_size import refuse_packed
from lightning_megatron.errors import CheckpointError

_PICKLES = 5  # of a file from before torch 1.6: magic number, version, machine, object, keys of storages


class StandIn:
    """Stand-in for an object whose class is not imported: its constructor's arguments, and its pickled state."""

    def __init__(self, *given: Any) -> None:
        self.given = given
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __repr__(self) -> str:
        return f"{type(self).__module__}.{type(self).__qualname__}{getattr(self, 'given', ())!r}"


def load_file(file: Path, *, allow_pickle: bool) -> dict[str, Any]:
    """The dictionary in a file that ``torch.save`` wrote; tensors are mapped, and read when they are used.

    With ``allow_pickle`` other objects are read too, as stand-ins.

    Raises:
        CheckpointError: if it is no such file, or holds objects and ``allow_pickle`` is not set.
    """
    refuse_packed(file)
    try:
        names = _names_in(file) if allow_pickle else []
        stand_ins: list[tuple[type, str]] = [(_stand_in(name), name) for name in names]
        if allow_pickle:
            stand_ins.append((argparse.Namespace, "argparse.Namespace"))
        with safe_globals(stand_ins):  # type: ignore[arg-type]  # torch 2.6 annotates only callables
            found = torch.load(file, map_location="cpu", mmap=zipfile.is_zipfile(file), weights_only=True)
    except pickle.UnpicklingError as error:
        if allow_pickle:
            raise CheckpointError(f"{file}: cannot be read: {_reason(error)}") from None
        raise CheckpointError(
            f"{file} holds objects beside primitives and tensors, as all files of Megatron with its command line do."
            " Convert it with `lightning-megatron convert megatron-to-ckpt` and --allow-pickle: nothing that it names"
            " is imported or run"
        ) from None
    except Exception as error:  # a damaged or hostile file may raise anything
        raise CheckpointError(f"{file}: truncated, or no file of torch.save: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{file}: holds a {type(found).__name__}, and no dictionary")
    return found


def command_line(content: dict[str, Any], file: Path) -> dict[str, Any] | None:
    """Megatron's command line in the content of a file; ``None`` if it has none.

    Raises:
        CheckpointError: if ``args`` is something else.
    """
    given = content.get("args")
    if given is not None and not isinstance(given, argparse.Namespace):
        raise CheckpointError(f"{file}: args is a {type(given).__name__}, and not Megatron's command line")
    return None if given is None else dict(vars(given))


def _reason(error: Exception) -> str:
    """The sentence of torch's long message that names the fault."""
    return str(error).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0]


def _names_in(file: Path) -> list[str]:
    """Classes and functions that a file names, except those of tensors and containers."""
    if zipfile.is_zipfile(file):
        return [name for name in get_unsafe_globals_in_checkpoint(file) if name != "argparse.Namespace"]
    return [name for name in dict.fromkeys(_names_in_stream(file)) if not name.startswith(("torch.", "collections."))]


def _names_in_stream(file: Path) -> Iterator[str]:
    with file.open("rb") as stream:
        for _ in range(_PICKLES):
            for opcode, argument, _ in pickletools.genops(stream):
                if opcode.name == "GLOBAL":
                    yield str(argument).replace(" ", ".")


def _stand_in(name: str) -> type[StandIn]:
    module, _, own = name.rpartition(".")
    return type(own, (StandIn,), {"__module__": module})
