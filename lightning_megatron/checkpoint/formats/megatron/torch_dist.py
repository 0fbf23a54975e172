"""Megatron's format ``torch_dist``: torch.distributed.checkpoint's files, with layers and experts stacked.

A tensor of every layer is one entry, with the layers as first dimension (``decoder.layers.mlp.linear_fc2.weight [L, H,
F]``), and so are experts (``... .mlp.experts.experts.linear_fc2.weight [L, E, H, F]``). If layers differ, or were saved
one by one, each has an entry of its own, and gates and ups are two entries (``weight_w``, ``weight_v``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_megatron.checkpoint.dcp.fragments import read_fragments
from lightning_megatron.checkpoint.formats.megatron.names import LAYERS, is_of_model, plain_name
from lightning_megatron.checkpoint.integrity.metadata_file import read_metadata
from lightning_megatron.checkpoint.integrity.unpacked_size import refuse_oversized
from lightning_megatron.checkpoint.tensors.fragment import Chunk, Fragment
from lightning_megatron.checkpoint.tensors.lazy_tensor import LazyTensor
from lightning_megatron.params import Box

COMMON = "common.pt"

_STACKED_LAYER = re.compile(rf"{re.escape(LAYERS)}(?!\d+\.)(.*)")
_EXPERTS = ".mlp.experts.experts."


def read_torch_dist(directory: Path) -> dict[str, LazyTensor]:
    """The tensors of the model, one for each layer and expert. Only names and shapes are read now.

    Raises:
        CheckpointError: if the directory cannot be read.
    """
    metadata = read_metadata(directory, only_known=False)
    refuse_oversized(directory, metadata)
    found: dict[str, LazyTensor] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata) and is_of_model(key):
            shape, dtype = tuple(entry.size), entry.properties.dtype
            for name, place in _unstacked(plain_name(key), shape):
                read_slice = partial(_read_slice, directory, metadata, key, shape, dtype, place)
                found[name] = LazyTensor(shape[len(place) :], dtype, read_slice)
    return _with_halves_joined(found)


def _unstacked(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Each tensor in a stack: its name, and its place along the first dimensions."""
    stacks: list[range] = []
    if layer := _STACKED_LAYER.fullmatch(name):
        name = f"{LAYERS}{{}}.{layer[1]}"
        stacks.append(range(shape[0]))
    before, experts, after = name.partition(_EXPERTS)
    if experts:
        numbered = after[0].isdigit()
        name = f"{before}.mlp.experts.{after}" if numbered else f"{before}.mlp.experts.{{}}.{after}"
        stacks += [] if numbered else [range(shape[len(stacks)])]
    for place in product(*stacks):
        yield name.format(*place), place


def _with_halves_joined(tensors: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
    """The tensors, with gates and ups that are stored apart joined to one tensor."""
    found = {}
    for name, gate in tensors.items():
        up = tensors.get(f"{name[:-1]}v") if name.endswith("_w") else None
        if up is not None:
            shape = (gate.shape[0] + up.shape[0], *gate.shape[1:])
            found[name.removesuffix("_w")] = LazyTensor(shape, gate.dtype, partial(_joined, gate, up))
        elif not (name.endswith("_v") and f"{name[:-1]}w" in tensors):
            found[name] = gate
    return found


def _joined(gate: LazyTensor, up: LazyTensor) -> Tensor:
    return torch.cat([gate.materialize(), up.materialize()])


def _read_slice(
    directory: Path, metadata: Metadata, key: str, shape: tuple[int, ...], dtype: torch.dtype, place: tuple[int, ...]
) -> Tensor:
    whole = torch.empty(shape[len(place) :], dtype=dtype)
    box = Box((*place, *[0] * whole.ndim), (*[1] * len(place), *whole.shape))
    chunk = Chunk(box, whole.view(box.sizes), write=False)
    read_fragments(directory, metadata, {key: Fragment(shape, dtype, (chunk,))})
    return whole
