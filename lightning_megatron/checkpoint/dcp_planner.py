"""What torch.distributed.checkpoint asks of fragments: who writes which box, who reads which.

Planners are DCP's public way in: every name imported here is exported and the same from torch 2.6 to 2.13. A tensor
subclass that answers DCP's ``__create_write_items__`` would do too, but rests on a private protocol and must survive
whatever DCP does to tensors on the way (``detach``, ``clone``, staging).
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lightning_megatron.checkpoint.fragment import Fragment, cover_fault
from lightning_megatron.checkpoint.lazy_tensor import LazyTensor
from lightning_megatron.params import Box

PER_RANK = "per_rank"


def tree_path(key: str) -> tuple[str, ...]:
    """Where a key stands in the nested dictionary that tools like Lightning's ``consolidate_checkpoint`` rebuild."""
    family, _, rest = key.partition(".")
    if family.startswith("optimizer_") and rest.startswith("state."):
        name, _, state = rest.removeprefix("state.").rpartition(".")
        return family, "state", name, state
    return (family, rest) if rest else (family,)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def _shard(key: str, value: Fragment | LazyTensor, box: Box) -> WriteItem:
    data = TensorWriteData(_chunk(box), TensorProperties(dtype=value.dtype), torch.Size(value.shape))
    return WriteItem(MetadataIndex(key, box.offsets), WriteItemType.SHARD, tensor_data=data)


class FragmentSavePlanner(SavePlanner):
    """Writes the parts of fragments that are this rank's to write, and any other value once in the job.

    A :class:`LazyTensor` is made when its turn comes, and let go when it is written.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Keep the state and index its parts by the name and offset that DCP will ask for."""
        self._state = state_dict
        self._parts: dict[tuple[str, torch.Size], Tensor] = {
            (key, torch.Size(part.box.offsets)): part.data
            for key, value in state_dict.items()
            if isinstance(value, Fragment)
            for part in value.parts
            if part.write
        }

    def create_local_plan(self) -> SavePlan:
        """One item a part, one a value that is no tensor."""
        items = []
        for key, value in self._state.items():
            if isinstance(value, LazyTensor):
                items.append(_shard(key, value, value.box))
            elif isinstance(value, Fragment):
                items += [_shard(key, value, part.box) for part in value.parts if part.write]
            else:
                items.append(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Drop what two ranks offer alike, and refuse a checkpoint with holes or overlaps."""
        plans = _without_repeats(all_plans)
        _refuse_disagreement(item for plan in plans for item in plan.items)
        plans, metadata = create_default_global_save_plan(plans)
        for key, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                fault = cover_fault(entry.size, [Box(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks])
                if fault:
                    raise ValueError(f"{key} of shape {tuple(entry.size)}: {fault}")
        paths = {key: tree_path(key) for key in metadata.state_dict_metadata}
        return plans, replace(metadata, planner_data=paths)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Nothing to add."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The view of live memory for a part, the pickled bytes for any other value."""
        index = write_item.index
        value = self._state[index.fqn]
        if isinstance(value, LazyTensor):
            return value.materialize()
        if write_item.type is not WriteItemType.BYTE_IO:
            assert index.offset is not None
            return self._parts[index.fqn, index.offset]
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return buffer


def _without_repeats(plans: list[SavePlan]) -> list[SavePlan]:
    # The state builders give each box one writer. This is for what they cannot know: a module of the user's that
    # stands under one name on several pipeline stages, and values that are no tensors and which every rank offers.
    seen: set[object] = set()

    def is_new(item: WriteItem) -> bool:
        chunk = item.tensor_data.chunk if item.tensor_data else None
        identity = (item.index.fqn, chunk and (tuple(chunk.offsets), tuple(chunk.sizes)))
        return identity not in seen and not seen.add(identity)  # type: ignore[func-returns-value]

    return [replace(plan, items=[item for item in plan.items if is_new(item)]) for plan in plans]


def _refuse_disagreement(items: Iterable[WriteItem]) -> None:
    known: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for item in items:
        if (data := item.tensor_data) is not None:
            ours = (tuple(data.size), data.properties.dtype)
            theirs = known.setdefault(item.index.fqn, ours)
            if ours != theirs:
                raise ValueError(f"ranks disagree about {item.index.fqn}: {theirs} on one, {ours} on another")


class FragmentLoadPlanner(LoadPlanner):
    """Reads what the parts of fragments need, in place, and any other value whole."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Keep the state to fill and the metadata of the checkpoint."""
        assert metadata is not None
        self._state = state_dict
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """The overlaps of every part with what was saved."""
        items: list[ReadItem] = []
        for key, value in self._state.items():
            entry = self._metadata.state_dict_metadata[key]
            if isinstance(entry, BytesStorageMetadata):
                whole, none = MetadataIndex(key), torch.Size((0,))
                items.append(ReadItem(LoadItemType.BYTE_IO, whole, none, whole, none, none))
            elif value.parts:
                reads = create_read_items_for_chunk_list(key, entry, [_chunk(part.box) for part in value.parts])
                _refuse_holes(key, value, reads)
                items += reads
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Every rank reads for itself."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Replace a value that is no tensor. Nothing but primitives and tensors is unpickled."""
        self._state[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The live memory that a read fills."""
        index = read_item.dest_index
        assert index.index is not None
        data = self._state[index.fqn].parts[index.index].data
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            data = data.narrow(dim, offset, length)
        return data

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing to do: :meth:`resolve_tensor` gave the memory itself."""


def _refuse_holes(key: str, fragment: Fragment, reads: list[ReadItem]) -> None:
    wanted = sum(prod(part.box.sizes) for part in fragment.parts)
    found = sum(prod(read.lengths) for read in reads)
    if wanted != found:
        raise ValueError(f"the checkpoint holds {found} of the {wanted} elements of {key} that this rank needs")


def load_faults(state: Mapping[str, Any], metadata: Metadata) -> tuple[list[str], list[str]]:
    """Keys of a state that a checkpoint lacks, and what else cannot be loaded, in words."""
    missing, faults = [], []
    for key, value in state.items():
        entry = metadata.state_dict_metadata.get(key)
        if entry is None:
            missing.append(key)
        elif isinstance(value, Fragment) != isinstance(entry, TensorStorageMetadata):
            faults.append(f"{key}: a tensor on one side, another kind of value on the other")
        elif isinstance(entry, TensorStorageMetadata) and tuple(entry.size) != value.shape:
            faults.append(f"{key}: shape {tuple(entry.size)} in the checkpoint, {value.shape} in the model")
    return missing, faults
