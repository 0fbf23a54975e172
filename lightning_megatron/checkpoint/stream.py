"""The tensors of a checkpoint one at a time, whole, in one process: to convert it without holding it."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_megatron.checkpoint.dcp_storage import read
from lightning_megatron.checkpoint.fragment import Fragment, Part
from lightning_megatron.checkpoint.integrity.metadata_file import read_metadata
from lightning_megatron.checkpoint.lazy_tensor import LazyTensor
from lightning_megatron.checkpoint.load import Loaded, load
from lightning_megatron.errors import CheckpointError
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.params import Box, is_calibration


def open_checkpoint(path: str | os.PathLike[str]) -> tuple[Loaded, dict[str, LazyTensor]]:
    """What a checkpoint of any layout says of itself, and its tensors by key, each read when it is made.

    Raises:
        CheckpointError: if there is no such checkpoint, or it is damaged.
    """
    path = Path(path)
    loaded = load(path, {}, ParallelMesh.single())
    metadata = read_metadata(path)

    def tensor(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        whole = torch.empty(shape, dtype=dtype)
        part = Part(Box.whole(shape), whole, write=False)
        try:
            read(path, metadata, {key: Fragment(shape, dtype, (part,))})
        except Exception as error:  # a damaged archive raises what it likes
            raise CheckpointError(f"{path}: {key} cannot be read: {error}") from None
        return whole

    found = {}
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata) and not is_calibration(key):
            shape, dtype = tuple(entry.size), entry.properties.dtype
            found[key] = LazyTensor(shape, dtype, partial(tensor, key, shape, dtype))
    return loaded, found
