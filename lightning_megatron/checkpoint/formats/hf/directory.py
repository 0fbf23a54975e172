"""A Hugging Face directory: ``config.json``, and tensors in one or several files, read one at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from torch import Tensor

from lightning_megatron.checkpoint.formats.safetensors_file import read_lazily
from lightning_megatron.checkpoint.integrity.fault import listed
from lightning_megatron.checkpoint.integrity.manifest import MANIFEST, is_plain_name
from lightning_megatron.checkpoint.integrity.unpacked_size import refuse_odd, refuse_packed
from lightning_megatron.checkpoint.tensors.lazy_tensor import LazyTensor
from lightning_megatron.errors import CheckpointError
from lightning_megatron.files.small import read_object

CONFIG = "config.json"
SAFETENSORS = "model.safetensors"
PICKLED = "pytorch_model.bin"
ADAPTER = "adapter_config.json"


def is_hf_directory(path: str | os.PathLike[str]) -> bool:
    """True if a path is a Hugging Face model's directory, and not a checkpoint of this package."""
    return (Path(path) / CONFIG).is_file() and not (Path(path) / MANIFEST).exists()


def refuse_adapter(path: str | os.PathLike[str]) -> None:
    """Refuse the directory of a whole model that also holds a PEFT adapter. Transformers would load both.

    Raises:
        CheckpointError: with the commands that merge the two.
    """
    if is_hf_directory(path) and (file := Path(path) / ADAPTER).is_file():
        raise CheckpointError(
            f"{file}: transformers adds this adapter to the model in its directory. This package does not. Merge them"
            f" with `lightning-megatron convert peft-to-ckpt {path} ADAPTER.ckpt --base {path}` and then"
            " `lightning-megatron convert merge ADAPTER.ckpt WHOLE.ckpt`, or move that file away to use its base"
        )


def index_name(file: str) -> str:
    """Name of the index of a model whose tensors are in several files."""
    return f"{file}.index.json"


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The contents of ``config.json``.

    Raises:
        CheckpointError: if it is not there, or is no JSON object.
    """
    file = Path(path) / CONFIG
    if not file.is_file():
        raise CheckpointError(f"{path} is no Hugging Face model: it has no {CONFIG}")
    return read_json_object(file)


def read_tensors(path: str | os.PathLike[str]) -> dict[str, LazyTensor]:
    """All tensors of the directory by name. Only headers are read now; values are read when a tensor is materialized.

    As in transformers, safetensors win over pickled files, and a single file over an index. All tensors of the files
    that an index names are read. Norms of the oldest files (``LayerNorm.gamma``) get their names of today.

    Raises:
        CheckpointError: naming files that are missing or cannot be read, and tensors that are in two files.
    """
    for name, header in ((SAFETENSORS, read_lazily), (PICKLED, _pickled)):
        for file, read in ((name, header), (index_name(name), partial(_indexed, header))):
            if (Path(path) / file).is_file():
                return {_todays(tensor): found for tensor, found in read(Path(path) / file).items()}
    raise CheckpointError(f"{path} holds no weights: neither {SAFETENSORS} nor {PICKLED}, nor an index of several")


def _todays(name: str) -> str:
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def weight_files(path: str | os.PathLike[str]) -> list[Path]:
    """Files of which :func:`read_tensors` reads the tensors; none if there are no weights."""
    for name in (SAFETENSORS, PICKLED):
        if (whole := Path(path) / name).is_file():
            return [whole]
        if (index := Path(path) / index_name(name)).is_file():
            return [index.with_name(name) for name in _names_in(index)]
    return []


def _names_in(index: Path) -> list[str]:
    """Names of the files that an index names."""
    places = read_json_object(index).get("weight_map")
    if not isinstance(places, dict):
        raise CheckpointError(f"{index}: it has no weight_map")
    faults = [
        f"{index}: {tensor} is said to be in {name!r}, which is no name of a file"
        for tensor, name in places.items()
        if not isinstance(name, str) or not is_plain_name(name)
    ]
    if faults:
        raise _misfits(faults)
    return sorted(set(places.values()))


def _indexed(header: Callable[[Path], dict[str, LazyTensor]], index: Path) -> dict[str, LazyTensor]:
    found: dict[str, LazyTensor] = {}
    files: dict[str, str] = {}
    faults: list[str] = []
    for name in _names_in(index):
        file = index.with_name(name)
        try:
            tensors = header(file)
        except CheckpointError as error:
            faults.append(str(error))
            continue
        faults += [
            f"{file}: {tensor} is a duplicate of the one in {files[tensor]}" for tensor in tensors if tensor in found
        ]
        found |= tensors
        files |= dict.fromkeys(tensors, name)
    if faults:
        raise _misfits(faults)
    return found


def _misfits(faults: Sequence[str]) -> CheckpointError:
    return CheckpointError(f"the files do not fit together:\n{listed(faults)}")


def _pickled(file: Path) -> dict[str, LazyTensor]:
    is_mapped = is_zipfile(file)
    return {
        name: LazyTensor(
            tuple(tensor.shape), tensor.dtype, partial(_unpickle, file, name) if is_mapped else tensor.clone
        )
        for name, tensor in _mapped(file).items()
    }


def _unpickle(file: Path, name: str) -> Tensor:
    return _mapped(file)[name]


def _mapped(file: Path) -> dict[str, Tensor]:
    """Memory-map a file of ``torch.save``: values are read when used. A file from before torch 1.6 is read whole."""
    refuse_packed(file)
    try:
        tensors: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))
    except Exception as error:  # it is a pickle: any error may come out of it
        raise CheckpointError(f"{file}: truncated or no file of its kind: {error}") from None
    if not isinstance(tensors, dict):
        raise CheckpointError(f"{file}: holds a {type(tensors).__name__}, and no dictionary of tensors")
    found = {name: tensor for name, tensor in tensors.items() if torch.is_tensor(tensor)}
    refuse_odd(file, found)
    return found


def read_json_object(file: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        CheckpointError: if it cannot be read, or holds something else.
    """
    try:
        return read_object(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from None
