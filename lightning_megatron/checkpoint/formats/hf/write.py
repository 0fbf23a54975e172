"""Write a Hugging Face directory, shard by shard, one tensor in memory at a time.

The files are safetensors: the length of the header (8 bytes, little-endian), the header as JSON, the bytes of the
tensors. All of the header is known from shapes, which is what lets the values come one by one; the library's own
``save_file`` wants a whole shard at once.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lightning_megatron.checkpoint.directory.atomic_dir import discard, prepare, publish, sync_file
from lightning_megatron.checkpoint.directory.leftovers import remove_stale
from lightning_megatron.checkpoint.formats.hf.directory import CONFIG, SAFETENSORS, SAFETENSORS_DTYPES, index_name
from lightning_megatron.checkpoint.formats.translate import Split
from lightning_megatron.errors import CheckpointError
from lightning_megatron.files.writing import writing

_KINDS = {dtype: kind for kind, dtype in SAFETENSORS_DTYPES.items()}
_ALIGNMENT = 8

Header = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def write_hf(
    path: str | os.PathLike[str],
    config: Mapping[str, Any],
    splits: Iterable[Split],
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int = 5 * 10**9,
    beside: Mapping[str, Path | Mapping[str, Any]] | None = None,
) -> None:
    """Write ``config.json`` and the weights; the directory has its name when it is complete and on the disk.

    Args:
        path: the directory to make.
        config: contents of ``config.json``; the dtype is added.
        splits: the tensors.
        dtype: of the files; ``None`` for the tensors' own.
        max_shard_size: bytes of a file's tensors; a larger tensor has a file of its own.
        beside: further files by name: what a JSON file is to hold, or a file to copy.

    Raises:
        CheckpointError: if something has the name already.
    """
    path, splits = Path(path), list(splits)
    if os.path.lexists(path):
        raise CheckpointError(f"{path} exists already: remove it or give another name")
    known: Header = {
        name: (dtype or tensor.dtype, tuple(tensor.shape)) for split in splits for name, tensor in split.tensors.items()
    }
    shards = plan_shards(known, max_shard_size)
    names = shard_names(len(shards))
    remove_stale(path.parent)
    directory = prepare(path)
    try:
        values = (value for split in splits for value in split.make())
        for name, shard in zip(names, shards, strict=True):
            _write_shard(directory / name, shard, values)
        if len(shards) > 1:
            places = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
            total = {"total_size": sum(_num_bytes(*entry) for entry in known.values())}
            _write_json(directory / index_name(SAFETENSORS), {"metadata": total, "weight_map": places})
        first = next(iter(known.values()))[0]
        _write_json(directory / CONFIG, {**config, "torch_dtype": str(first).removeprefix("torch.")})
        for name, content in (beside or {}).items():
            if isinstance(content, Path):
                shutil.copyfile(content, directory / name)
                sync_file(directory / name)
            else:
                _write_json(directory / name, content)
        publish(directory, path)
    except BaseException:
        discard(directory)
        raise


def plan_shards(tensors: Header, max_size: int) -> list[Header]:
    """Cut a list of tensors into files of at most ``max_size`` bytes, in order."""
    shards: list[Header] = [{}]
    size = 0
    for name, entry in tensors.items():
        more = _num_bytes(*entry)
        if shards[-1] and size + more > max_size:
            shards.append({})
            size = 0
        shards[-1][name] = entry
        size += more
    return shards


def shard_names(count: int) -> list[str]:
    """File names as transformers gives them."""
    if count == 1:
        return [SAFETENSORS]
    stem = SAFETENSORS.removesuffix(".safetensors")
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _write_shard(file: Path, shard: Header, values: Iterator[Tensor]) -> None:
    with writing(file):
        with file.open("wb") as stream:
            stream.write(header_bytes(shard))
            for dtype, _ in shard.values():
                _write_tensor(stream, next(values).to(dtype))
        sync_file(file)


def _write_tensor(stream: BinaryIO, tensor: Tensor) -> None:
    stream.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)


def header_bytes(shard: Header) -> bytes:
    """The beginning of a safetensors file with these tensors, in this order and end to end."""
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, (dtype, shape) in shard.items():
        end = place + _num_bytes(dtype, shape)
        content[name] = {"dtype": _KINDS[dtype], "shape": shape, "data_offsets": (place, end)}
        place = end
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _num_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    with writing(file):
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        sync_file(file)
