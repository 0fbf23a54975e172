"""Fragments to and from the files of torch.distributed.checkpoint (DCP).

:func:`write_fragments` and :func:`read_fragments` make the calls that DCP's ``StorageWriter`` and ``StorageReader``
document, in their order. ``dcp.save`` and ``dcp.load`` make the same calls, but their arguments changed from torch 2.6
on, they refuse to serve one process of a larger job, and they raise errors that ``except Exception`` does not catch.

The planners below them tell DCP which rank writes or reads which box. Planners are DCP's public interface: every name
imported here is exported and the same from torch 2.6 to 2.13. A tensor subclass with DCP's ``__create_write_items__``
would do too, but rests on a private protocol and would have to survive all that DCP does to tensors on the way
(``detach``, ``clone``, staging).
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
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

from lightning_megatron.checkpoint.dcp.box_reader import BoxReader
from lightning_megatron.checkpoint.dcp.box_writer import BoxWriter
from lightning_megatron.checkpoint.integrity.manifest import FileRecord, record, records
from lightning_megatron.checkpoint.integrity.metadata_file import METADATA
from lightning_megatron.checkpoint.tensors.fragment import Fragment, cover_fault, part_of
from lightning_megatron.checkpoint.tensors.keys import Key
from lightning_megatron.checkpoint.tensors.lazy_tensor import LazyTensor
from lightning_megatron.checkpoint.tensors.state_dict import State
from lightning_megatron.comm.all_ranks import on_all_ranks
from lightning_megatron.comm.objects import gather_object, scatter_object
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.params import Box


def write_fragments(directory: Path, state: State, mesh: ParallelMesh, action: str) -> dict[str, FileRecord]:
    """Write a state as ``.metadata`` and one ``__R_0.distcp`` per rank. Every rank must call this.

    Lazy tensors get a file each, so that each can be freed when its file is on the disk.

    Returns:
        Lengths and hashes of the files that this rank has written, by name, made from the bytes in memory.

    Raises:
        CheckpointError: on every rank, if any step failed on any.
    """
    streams = any(isinstance(value, LazyTensor) for value in state.values())
    planner = FragmentSavePlanner()
    writer = BoxWriter(directory, single_file=not streams)
    is_rank_zero = mesh.rank == 0

    def plan_own() -> SavePlan:
        planner.set_up_planner(state, writer.storage_meta(), is_rank_zero)
        writer.set_up_storage_writer(is_rank_zero)
        return writer.prepare_local_plan(planner.create_local_plan())

    def plan_all() -> tuple[list[SavePlan], Metadata] | None:
        if plans is None:
            return None
        adjusted, metadata = planner.create_global_plan(plans)
        return writer.prepare_global_plan(adjusted), metadata

    plans = gather_object(mesh, on_all_ranks(mesh, action, plan_own))
    agreed = on_all_ranks(mesh, action, plan_all)
    own = scatter_object(mesh, agreed and agreed[0])
    written = on_all_ranks(mesh, action, lambda: writer.write_data(planner.finish_plan(own), planner).wait())
    results = gather_object(mesh, written)

    def finish() -> None:
        if agreed and results:
            writer.finish(agreed[1], results)

    def check() -> dict[str, FileRecord]:
        own = {} if mesh.rank else {METADATA: record(directory / METADATA)}
        return records(directory, writer.records | own)

    on_all_ranks(mesh, action, finish)
    return on_all_ranks(mesh, action, check)


def read_fragments(directory: Path, metadata: Metadata, state: State) -> None:
    """Fill a state in place. Each rank reads on its own, without collectives."""
    planner, reader = FragmentLoadPlanner(), BoxReader(directory)
    planner.set_up_planner(state, metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def _shard(key: str, value: Fragment | LazyTensor, box: Box) -> WriteItem:
    data = TensorWriteData(_chunk(box), TensorProperties(dtype=value.dtype), torch.Size(value.shape))
    return WriteItem(MetadataIndex(key, box.offsets), WriteItemType.SHARD, tensor_data=data)


class FragmentSavePlanner(SavePlanner):
    """Writes the chunks of fragments that are this rank's to write, and any other value once in the job.

    A :class:`LazyTensor` is materialized when its turn comes, and freed when it is written.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Keep the state and index its chunks by the name and offset that DCP will ask for."""
        self._state = state_dict
        self._chunks: dict[tuple[str, torch.Size], Tensor] = {
            (key, torch.Size(chunk.box.offsets)): chunk.data
            for key, value in state_dict.items()
            if isinstance(value, Fragment)
            for chunk in value.chunks
            if chunk.write
        }

    def create_local_plan(self) -> SavePlan:
        """One item per chunk, and one per value that is no tensor."""
        items = []
        for key, value in self._state.items():
            if isinstance(value, LazyTensor):
                items.append(_shard(key, value, Box.whole(value.shape)))
            elif isinstance(value, Fragment):
                items += [_shard(key, value, chunk.box) for chunk in value.chunks if chunk.write]
            else:
                items.append(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Drop items that two ranks offer, and refuse a checkpoint with holes or overlaps."""
        plans = _without_repeats(all_plans)
        _refuse_disagreement(item for plan in plans for item in plan.items)
        plans, metadata = create_default_global_save_plan(plans)
        for key, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                fault = cover_fault(entry.size, [Box(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks])
                if fault:
                    raise ValueError(f"{key} of shape {tuple(entry.size)}: {fault}")
        paths = {key: Key.parse(key).path for key in metadata.state_dict_metadata}
        return plans, replace(metadata, planner_data=paths)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan, unchanged."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The view of live memory for a chunk, the pickled bytes for any other value."""
        index = write_item.index
        value = self._state[index.fqn]
        if isinstance(value, LazyTensor):
            return value.materialize()
        if write_item.type is not WriteItemType.BYTE_IO:
            assert index.offset is not None
            return self._chunks[index.fqn, index.offset]
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return buffer


def _without_repeats(plans: list[SavePlan]) -> list[SavePlan]:
    # The state builders give each box one writer. They do not know modules of the user's that have one name on several
    # pipeline stages, nor values that are no tensors, which every rank offers.
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
    """Reads the boxes of fragments in place, and other values whole."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Keep the state to fill and the metadata of the checkpoint."""
        assert metadata is not None
        self._state = state_dict
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """The overlaps of every chunk with what was saved."""
        items: list[ReadItem] = []
        for key, value in self._state.items():
            entry = self._metadata.state_dict_metadata[key]
            if isinstance(entry, BytesStorageMetadata):
                whole, none = MetadataIndex(key), torch.Size((0,))
                items.append(ReadItem(LoadItemType.BYTE_IO, whole, none, whole, none, none))
            elif value.chunks:
                reads = create_read_items_for_chunk_list(key, entry, [_chunk(chunk.box) for chunk in value.chunks])
                _refuse_holes(key, value, reads)
                items += reads
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """The plans, unchanged: every rank reads for itself."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The plan, unchanged."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Replace a value that is no tensor. Nothing but primitives and tensors is unpickled."""
        self._state[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The live memory that a read fills."""
        index = read_item.dest_index
        assert index.index is not None
        data = self._state[index.fqn].chunks[index.index].data
        return part_of(data, Box(read_item.dest_offsets, read_item.lengths))

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing to do: :meth:`resolve_tensor` gave the memory itself."""


def _refuse_holes(key: str, fragment: Fragment, reads: list[ReadItem]) -> None:
    wanted = sum(prod(chunk.box.sizes) for chunk in fragment.chunks)
    found = sum(prod(read.lengths) for read in reads)
    if wanted != found:
        raise ValueError(f"the checkpoint holds {found} of the {wanted} elements of {key} that this rank needs")


def load_faults(state: Mapping[str, Any], metadata: Metadata) -> tuple[list[str], list[str]]:
    """Keys of a state that a checkpoint lacks, and descriptions of everything else that cannot be loaded."""
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
