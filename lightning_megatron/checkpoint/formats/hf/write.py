"""Write a Hugging Face directory, shard by shard, one tensor in memory at a time.

The header of a safetensors file depends only on dtypes and shapes, so values can be written one by one; the library's
own ``save_file`` needs a whole shard at once.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.checkpoint.directory.atomic_dir import discard, prepare, publish
from lightning_megatron.checkpoint.directory.leftovers import remove_stale
from lightning_megatron.checkpoint.formats.hf.directory import CONFIG, SAFETENSORS, index_name
from lightning_megatron.checkpoint.formats.safetensors_file import header_bytes, num_bytes
from lightning_megatron.checkpoint.formats.weight_map import Split
from lightning_megatron.checkpoint.tensors.lazy_tensor import cast
from lightning_megatron.comm.p2p import as_bytes
from lightning_megatron.errors import CheckpointError
from lightning_megatron.files.durable import sync_file
from lightning_megatron.files.writing import writing

Shard = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of each tensor of a file by name."""


def write_hf(
    path: str | os.PathLike[str],
    config: Mapping[str, Any],
    splits: Iterable[Split],
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int = 5 * 10**9,
    beside: Mapping[str, Path | str | Mapping[str, Any]] | None = None,
) -> None:
    """Write ``config.json`` and the weights. The directory gets its name once it is complete and on the disk.

    Args:
        path: the directory to make.
        config: contents of ``config.json``; the dtype is added.
        splits: the tensors, as :meth:`WeightMap.to_foreign` gives them.
        dtype: dtype of the files; ``None`` for the tensors' own.
        max_shard_size: maximum bytes of the tensors in a file; a larger tensor gets a file of its own.
        beside: additional files by name: the contents of a JSON file, a text, or the path of a file to copy.

    Raises:
        CheckpointError: if ``path`` exists already, or naming tensors whose values ``dtype`` cannot hold.
    """
    path, splits = Path(path), list(splits)
    if os.path.lexists(path):
        raise CheckpointError(f"{path} exists already: remove it or give another name")
    known: Shard = {
        name: (dtype or tensor.dtype, tuple(tensor.shape)) for split in splits for name, tensor in split.tensors.items()
    }
    shards = plan_shards(known, max_shard_size)
    names = shard_names(len(shards))
    remove_stale(path.parent)
    directory = prepare(path)
    try:
        values = (pair for split in splits for pair in zip(split.tensors, split.materialize(), strict=True))
        for name, shard in zip(names, shards, strict=True):
            _write_shard(directory / name, shard, values)
        if len(shards) > 1:
            places = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
            total = {"total_size": sum(num_bytes(*entry) for entry in known.values())}
            _write_file(directory / index_name(SAFETENSORS), {"metadata": total, "weight_map": places})
        first = next(iter(known.values()))[0]
        _write_file(directory / CONFIG, {**config, "torch_dtype": str(first).removeprefix("torch.")})
        for name, content in (beside or {}).items():
            _write_file(directory / name, content)
        publish(directory, path)
    except BaseException:
        discard(directory)
        raise


def plan_shards(tensors: Shard, max_size: int) -> list[Shard]:
    """Cut a list of tensors into files of at most ``max_size`` bytes, in order."""
    shards: list[Shard] = [{}]
    size = 0
    for name, entry in tensors.items():
        more = num_bytes(*entry)
        if shards[-1] and size + more > max_size:
            shards.append({})
            size = 0
        shards[-1][name] = entry
        size += more
    return shards


def shard_names(count: int) -> list[str]:
    """File names of shards, as transformers names them."""
    if count == 1:
        return [SAFETENSORS]
    stem = SAFETENSORS.removesuffix(".safetensors")
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _write_shard(file: Path, shard: Shard, values: Iterator[tuple[str, Tensor]]) -> None:
    with writing(file):
        with file.open("wb") as stream:
            stream.write(header_bytes(shard))
            for dtype, _ in shard.values():
                stream.write(as_bytes(cast(*next(values), dtype, values)).numpy().data)
        sync_file(file)


def _write_file(file: Path, content: Path | str | Mapping[str, Any]) -> None:
    """Copy a file, or write a text or JSON."""
    file.parent.mkdir(exist_ok=True)
    with writing(file):
        if isinstance(content, Path):
            shutil.copyfile(content, file)
        else:
            text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
            file.write_text(text, encoding="utf-8")
        sync_file(file)
