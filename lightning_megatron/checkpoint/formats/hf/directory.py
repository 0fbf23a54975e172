"""A Hugging Face directory: ``config.json``, and tensors in one file or several, read one at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_megatron.checkpoint.formats.unpacked_size import refuse_odd, refuse_packed
from lightning_megatron.checkpoint.integrity.manifest import MANIFEST, is_plain_name
from lightning_megatron.checkpoint.lazy_tensor import LazyTensor
from lightning_megatron.errors import CheckpointError
from lightning_megatron.files.small import read_object

CONFIG = "config.json"
SAFETENSORS = "model.safetensors"
PICKLED = "pytorch_model.bin"
SAFETENSORS_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_SHOWN = 10


def is_hf_directory(path: str | os.PathLike[str]) -> bool:
    """True if a path is a Hugging Face model's directory, and not a checkpoint of this package."""
    return (Path(path) / CONFIG).is_file() and not (Path(path) / MANIFEST).exists()


def index_name(file: str) -> str:
    """Name of the index of a model whose file has been cut into several."""
    return f"{file}.index.json"


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The contents of ``config.json``.

    Raises:
        CheckpointError: if it is not there, or is no JSON object.
    """
    file = Path(path) / CONFIG
    if not file.is_file():
        raise CheckpointError(f"{path} is no Hugging Face model: it has no {CONFIG}")
    return read_json(file)


def read_tensors(path: str | os.PathLike[str]) -> dict[str, LazyTensor]:
    """All tensors of the directory by name. Only headers are read; values are when a tensor is made.

    Safetensors are taken before pickled files, and an index before a file in one piece, as transformers does.

    Raises:
        CheckpointError: naming files that are missing or cannot be read, and tensors that are missing, that stand in
            two files, or that the index does not know.
    """
    path = Path(path)
    for name, header in ((SAFETENSORS, _safetensors), (PICKLED, _pickled)):
        if (path / index_name(name)).is_file():
            return _indexed(path, path / index_name(name), header)
        if (path / name).is_file():
            return header(path / name)
    raise CheckpointError(f"{path} holds no weights: neither {SAFETENSORS} nor {PICKLED}, nor an index of several")


def _indexed(path: Path, index: Path, header: Callable[[Path], dict[str, LazyTensor]]) -> dict[str, LazyTensor]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict):
        raise CheckpointError(f"{index}: it has no weight_map")
    faults = [
        f"{index}: {tensor} is said to be in {name!r}, which is no name of a file"
        for tensor, name in places.items()
        if not isinstance(name, str) or not is_plain_name(name)
    ]
    if faults:
        raise _misfits(faults)
    files: dict[str, dict[str, LazyTensor]] = {}
    for name in sorted(set(places.values())):
        try:
            files[name] = header(path / name)
        except CheckpointError as error:
            faults.append(str(error))
    for tensor, name in sorted(places.items()):
        if name in files and tensor not in files[name]:
            faults.append(f"{path / name}: {tensor} is missing, which {index.name} says is there")
    for name, tensors in files.items():
        for tensor in tensors:
            if tensor not in places:
                faults.append(f"{path / name}: {tensor} is not in {index.name}")
            elif places[tensor] != name:
                faults.append(f"{path / name}: {tensor} is a duplicate of the one in {places[tensor]}")
    if faults:
        raise _misfits(faults)
    return {tensor: files[name][tensor] for tensor, name in places.items()}


def _misfits(faults: Sequence[str]) -> CheckpointError:
    more = [f"... and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
    return CheckpointError("\n  - ".join(["the files do not fit together:", *faults[:_SHOWN], *more]))


def _safetensors(file: Path) -> dict[str, LazyTensor]:
    found = {}
    with _opened(file) as stream:
        for name in stream.keys():  # noqa: SIM118 - it is no mapping
            part = stream.get_slice(name)
            if (kind := part.get_dtype()) not in SAFETENSORS_DTYPES:
                raise CheckpointError(f"{file}: {name} is of dtype {kind}, which no model of ours has")
            found[name] = LazyTensor(tuple(part.get_shape()), SAFETENSORS_DTYPES[kind], partial(_read, file, name))
    return found


def _read(file: Path, name: str) -> Tensor:
    # The file is opened for each tensor: what it maps into memory goes when the tensor goes.
    with _opened(file) as stream:
        tensor: Tensor = stream.get_tensor(name)
        return tensor


def _opened(file: Path) -> Any:
    try:
        if file.exists() and not file.is_file():  # a pipe would wait to be opened
            raise OSError("no ordinary file")
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise _unreadable(file, error) from None


def _pickled(file: Path) -> dict[str, LazyTensor]:
    return {
        name: LazyTensor(tuple(tensor.shape), tensor.dtype, partial(_unpickle, file, name))
        for name, tensor in _mapped(file).items()
    }


def _unpickle(file: Path, name: str) -> Tensor:
    return _mapped(file)[name]


def _mapped(file: Path) -> dict[str, Tensor]:
    """A file of ``torch.save``, mapped: values are read when they are used."""
    refuse_packed(file)
    try:
        tensors: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # it is a pickle: any error may come out of it
        raise _unreadable(file, error) from None
    if not isinstance(tensors, dict):
        raise CheckpointError(f"{file}: holds a {type(tensors).__name__}, and no dictionary of tensors")
    found = {name: tensor for name, tensor in tensors.items() if torch.is_tensor(tensor)}
    refuse_odd(file, found)
    return found


def _unreadable(file: Path, error: Exception) -> CheckpointError:
    if not file.is_file():
        return CheckpointError(f"{file}: {'no ordinary file' if file.exists() else 'missing'}")
    return CheckpointError(f"{file}: truncated or no file of its kind: {error}")


def read_json(file: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        CheckpointError: if it cannot be read, or holds something else.
    """
    try:
        return read_object(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from None
