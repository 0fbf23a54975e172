"""``meta.pt``: loops, callbacks, hyper-parameters and everything else of a checkpoint that is no large tensor.

It must load with ``weights_only=True``: a checkpoint from elsewhere may not run code.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_megatron.checkpoint.integrity.unpacked_size import refuse_packed
from lightning_megatron.errors import CheckpointError
from lightning_megatron.files.durable import sync_file

META = "meta.pt"
NOTE = "lightning_megatron"
"""Key of this package's own notes: the other versions of the weights, and in a single file also its layout etc."""
VERSION = "pytorch-lightning_version"
LIGHTNINGS = {
    VERSION: str,
    "epoch": int,
    "global_step": int,
    "loops": dict,
    "callbacks": dict,
    "lr_schedulers": list,
    "optimizer_states": list,
}
"""Entries of the Trainer's own, with their types."""
_MAPPINGS = ("hyper_parameters", "hugging_face")
"""Entries that are mappings of any class, or ``None``."""


def is_plain(value: Any) -> bool:
    """True if a value survives ``torch.save`` and ``torch.load(weights_only=True)``."""
    return is_surely_plain(value) or _survives(value)


def is_surely_plain(value: Any, depth: int = 20) -> bool:
    """True for lists, tuples and dicts of numbers, strings and tensors, which are plain without a trial save.

    ``depth`` is the number of nested containers that are inspected.
    """
    kind = type(value)
    if kind in (str, float, bool, type(None)):
        return True
    if kind is int:
        return -(1 << 63) <= value < 1 << 63  # larger ones are pickled in another form
    if kind is torch.Tensor:
        return value.layout is torch.strided and value.is_cpu and not value.is_quantized and not vars(value)
    if depth and kind in (list, tuple):
        return all(is_surely_plain(child, depth - 1) for child in value)
    if depth and kind is dict:
        return all(is_surely_plain(child, depth - 1) for pair in value.items() for child in pair)
    return False


def _survives(value: Any) -> bool:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception:  # pickle, torch and the value's own __reduce__ may raise anything
        return False
    return True


def objects_in(value: Any, path: str = "") -> Iterator[str]:
    """Key paths and types of the objects that keep a value from being plain."""
    if is_plain(value):
        return
    children: Iterator[tuple[str, Any]] = iter(())
    if isinstance(value, dict):
        keys = [key for key in value if not is_plain(key)]
        yield from (f"{path}: the key {key!r}" for key in keys)
        children = ((f"{path}.{key}" if path else str(key), child) for key, child in value.items())
    elif isinstance(value, list | tuple | set):
        children = ((f"{path}[{number}]", child) for number, child in enumerate(value))
    inside = [fault for where, child in children for fault in objects_in(child, where)]
    if inside:
        yield from inside
    else:
        yield f"{path or 'the value itself'}: {type(value).__module__}.{type(value).__qualname__}"


def refuse_objects(value: Any, what: str, advice: str) -> None:
    """Raise if a value is not plain.

    Raises:
        CheckpointError: with the key path of every object that is not plain.
    """
    if faults := list(objects_in(value)):
        listed = "\n".join(f"  - {fault}" for fault in faults)
        raise CheckpointError(f"{what} must hold only primitives, containers and tensors, but has\n{listed}\n{advice}")


def render_meta(meta: dict[str, Any], allow_objects: bool) -> bytes:
    """Content of ``meta.pt``."""
    if not allow_objects:
        refuse_objects(
            meta,
            "what a checkpoint holds beside large tensors",
            "Store them as plain containers (str(path), dataclasses.asdict(config)), or save with allow_objects=True; "
            "such a checkpoint loads only with weights_only=False, which runs code that is in the file.",
        )
    buffer = io.BytesIO()
    torch.save(meta, buffer)
    return buffer.getvalue()


def write_meta(directory: Path, content: bytes) -> None:
    """Write ``meta.pt``."""
    file = directory / META
    file.write_bytes(content)
    sync_file(file)


def type_faults(meta: dict[str, Any]) -> list[str]:
    """Entries of Lightning's dictionary with a wrong type, which would fail deep inside Lightning."""
    return [
        f"{name} is a {type(meta[name]).__name__}, and should be a {kind.__name__}"
        for name, kind in LIGHTNINGS.items()
        if name in meta and type(meta[name]) is not kind
    ] + [
        f"{name} is a {type(meta[name]).__name__}, and should be a dict"
        for name in _MAPPINGS
        if not isinstance(meta.get(name), Mapping | None)
    ]


def read_meta(directory: Path, weights_only: bool) -> dict[str, Any]:
    """Read ``meta.pt``.

    Raises:
        CheckpointError: if it holds objects and ``weights_only`` is set, is no such file, or holds other types than
            Lightning writes.
    """
    file = directory / META
    refuse_packed(file)
    try:
        content = torch.load(file, map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file} holds objects beside primitives and tensors. Load it with weights_only=False if you "
            f"trust where it comes from: that runs code which is in the file. ({error})"
        ) from None
    except Exception as error:  # torch does not document what it raises for other files
        raise CheckpointError(f"{file}: damaged, or no file of torch.save: {type(error).__name__}: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds a {type(content).__name__}, and no dictionary of Lightning's")
    if wrong := type_faults(content):
        raise CheckpointError(f"{file}: the Trainer's state in it is damaged: {'; '.join(wrong)}")
    return content


def refuse_other_writers(path: str | os.PathLike[str], meta: Mapping[str, Any]) -> None:
    """Raise if a checkpoint was not saved by a Trainer, because loading would fail deep inside Lightning."""
    if VERSION not in meta:
        file = Path(path) / META if Path(path).is_dir() else path
        raise CheckpointError(f"{file} holds no {VERSION}: it was not saved by a Trainer")
