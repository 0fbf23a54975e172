"""Optimizer state of any layout to one file and back, through the host memory of as few ranks as a level allows."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_megatron.checkpoint.formats import safetensors_file
from lightning_megatron.checkpoint.formats.meta import refuse_objects
from lightning_megatron.checkpoint.formats.safetensors_file import Entry
from lightning_megatron.checkpoint.integrity.fault import listed
from lightning_megatron.checkpoint.optimizer_export.memory_levels import StateHolders, collecting_steps
from lightning_megatron.checkpoint.tensors.fragment import Chunk, Fragment
from lightning_megatron.checkpoint.tensors.keys import not_begun
from lightning_megatron.checkpoint.tensors.state_dict import State
from lightning_megatron.comm.all_ranks import on_all_ranks
from lightning_megatron.comm.objects import all_gather_object
from lightning_megatron.comm.p2p import as_bytes, receive, send
from lightning_megatron.errors import CheckpointError
from lightning_megatron.files.durable import sync_file
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.params import Box

T = TypeVar("T")
_Kind = tuple[torch.dtype, tuple[int, ...]]
_Place = tuple[str, Box]
_Offer = tuple[str, Box, bool]
"""Key, box, and True for an expert's: the description of a chunk that other ranks need."""


@dataclass
class HostMemory:
    """Host memory of this rank that an export or import takes beside the state itself: bytes now and at the peak."""

    now: int = 0
    peak: int = 0

    def take(self, tensor: Tensor) -> Tensor:
        """Count a tensor as in use, and return it."""
        self.now += tensor.nbytes
        self.peak = max(self.peak, self.now)
        return tensor

    def release(self) -> None:
        """Count everything as freed."""
        self.now = 0


@dataclass(frozen=True)
class Collectors:
    """The plan by which ranks collect the chunks of a state.

    Attributes:
        mesh: mesh of this rank.
        level: name in ``MEMORY_LEVELS``.
        ranks_per_node: number of processes on a node.
    """

    mesh: ParallelMesh
    level: str
    ranks_per_node: int

    @property
    def steps(self) -> list[list[StateHolders]]:
        """Groups that are collected at the same time, step by step.

        Raises:
            ConfigError: for an unknown level.
        """
        return collecting_steps(self.mesh.layout, self.ranks_per_node, self.level)


def export_state(
    path: str | os.PathLike[str],
    state: State,
    experts: Collection[str],
    through: Collectors,
) -> HostMemory:
    """Write a state to one file, with equal bytes at every level and in every layout. Every rank must call this.

    Args:
        path: safetensors file to make or to replace atomically, on a file system that the collecting nodes share.
        state: fragments of this rank, and other values, which are equal on all ranks.
        experts: keys of experts' state.
        through: mesh and plan of collection.

    Returns:
        Host memory that the export took on this rank.

    Raises:
        ConfigError: for an unknown level.
        CheckpointError: on every rank, if anything failed on any; a file of that name is then untouched.
    """
    path, action = Path(path), f"exporting {path}"
    mesh, steps = through.mesh, through.steps
    packed = on_all_ranks(mesh, action, lambda: _packed(state))
    own = _chunks(state, only_written=True)
    offered = all_gather_object(mesh, [(*place, place[0] in experts) for place in own])
    known = _known(mesh, state, packed)
    is_rank_zero, memory = mesh.rank == 0, HostMemory()
    try:
        entries = _from_first(mesh, action, lambda: safetensors_file.create_unfinished(path, known))
        for step in steps:
            held = {place: x for group in step for place, x in _gather(group, offered, own, known, mesh, memory)}
            on_all_ranks(mesh, action, partial(_write, path, entries, held))
            held.clear()
            memory.release()
        plain = {(key, Box.whole(tuple(value.shape))): value for key, value in packed.items()}
        on_all_ranks(mesh, action, partial(_write, path, entries, plain if is_rank_zero else {}))
        on_all_ranks(mesh, action, lambda: safetensors_file.publish_unfinished(path) if is_rank_zero else None)
    except CheckpointError:
        if is_rank_zero:
            with suppress(OSError):
                safetensors_file.unfinished_path(path).unlink()
        raise
    return memory


def import_state(
    path: str | os.PathLike[str],
    state: State,
    experts: Collection[str],
    through: Collectors,
    alike: Collection[str] = (),
) -> HostMemory:
    """Fill a state in place from such a file of any layout; arguments of :func:`export_state`. Every rank calls this.

    Keys of parameters that had no gradient so far are removed (:func:`not_begun`, which explains ``alike``).

    Raises:
        ConfigError: for an unknown level.
        CheckpointError: on every rank, if the file cannot be read or does not fit.
    """
    path, action = Path(path), f"loading {path}"
    mesh, steps = through.mesh, through.steps
    entries = _from_first(mesh, action, lambda: safetensors_file.read_entries(path))
    for key in not_begun(state, entries, alike):
        del state[key]
    on_all_ranks(mesh, action, lambda: _refuse_misfit(state, entries))
    own = _chunks(state, only_written=False)
    wanted = all_gather_object(mesh, [(*place, place[0] in experts) for place in own])
    memory = HostMemory()
    for step in steps:
        mine = [group for group in step if group.collector == mesh.rank]
        held = on_all_ranks(mesh, action, partial(_read, path, entries, mine, wanted, memory))
        for group in step:
            _scatter(group, wanted, own, held, entries, mesh)
        held.clear()
        memory.release()
    plain = [key for key, value in state.items() if not isinstance(value, Fragment)]
    state.update(_from_first(mesh, action, lambda: {key: _unpacked(path, entries[key]) for key in plain}))
    return memory


def _from_first(mesh: ParallelMesh, action: str, make: Callable[[], dict[str, T]]) -> dict[str, T]:
    """Result of ``make`` on rank 0, sent to all ranks."""
    return all_gather_object(mesh, on_all_ranks(mesh, action, lambda: make() if mesh.rank == 0 else {}))[0]


def _chunks(state: State, *, only_written: bool) -> dict[_Place, list[Chunk]]:
    found: dict[_Place, list[Chunk]] = {}
    for key, value in state.items():
        for chunk in value.chunks if isinstance(value, Fragment) else ():
            if chunk.write or not only_written:
                found.setdefault((key, chunk.box), []).append(chunk)
    return found


def _known(mesh: ParallelMesh, state: State, packed: Mapping[str, Tensor]) -> dict[str, _Kind]:
    """Dtypes and shapes of all tensors of the job, in an order that no layout changes."""
    kinds = {key: (value.dtype, value.shape) for key, value in state.items() if isinstance(value, Fragment)}
    kinds |= {key: (value.dtype, tuple(value.shape)) for key, value in packed.items()}
    found = {key: kind for some in all_gather_object(mesh, kinds) for key, kind in some.items()}
    return dict(sorted(found.items()))


def _gather(
    group: StateHolders,
    offered: Sequence[Sequence[_Offer]],
    own: Mapping[_Place, Sequence[Chunk]],
    known: Mapping[str, _Kind],
    mesh: ParallelMesh,
    memory: HostMemory,
) -> Iterator[tuple[_Place, Tensor]]:
    """Send this rank's chunks of a group to its collector, or receive them if this rank is the collector."""
    for member in group.ranks:
        for key, box, of_experts in offered[member]:
            if of_experts != group.of_experts:
                continue
            if mesh.rank == group.collector:
                buffer = memory.take(torch.empty(box.sizes, dtype=known[key][0]))
                if member == mesh.rank:
                    buffer.copy_(own[key, box][0].data)
                elif buffer.numel():
                    receive(as_bytes(buffer), mesh.host, member)
                yield (key, box), buffer
            elif mesh.rank == member and (data := own[key, box][0].data).numel():
                send(as_bytes(data), mesh.host, group.collector)


def _scatter(
    group: StateHolders,
    wanted: Sequence[Sequence[_Offer]],
    own: Mapping[_Place, Sequence[Chunk]],
    held: Mapping[_Place, Tensor],
    entries: Mapping[str, Entry],
    mesh: ParallelMesh,
) -> None:
    """Send the chunks of a group from its collector to its members, or receive this rank's."""
    for member in group.ranks:
        for key, box, of_experts in wanted[member]:
            if of_experts != group.of_experts:
                continue
            if mesh.rank == group.collector:
                value = held[key, box]
                if member != mesh.rank and value.numel():
                    send(as_bytes(value), mesh.host, member)
            elif mesh.rank == member:
                value = torch.empty(box.sizes, dtype=entries[key].dtype)
                if value.numel():
                    receive(as_bytes(value), mesh.host, group.collector)
            if mesh.rank == member:
                for chunk in own[key, box]:
                    chunk.data.copy_(value)


def _read(
    path: Path,
    entries: Mapping[str, Entry],
    groups: Sequence[StateHolders],
    wanted: Sequence[Sequence[_Offer]],
    memory: HostMemory,
) -> dict[_Place, Tensor]:
    """Read the chunks that the members of groups need, each once."""
    held: dict[_Place, Tensor] = {}
    for group in groups:
        for key, box, of_experts in (offer for member in group.ranks for offer in wanted[member]):
            if of_experts == group.of_experts and (key, box) not in held:
                held[key, box] = memory.take(safetensors_file.read_part(path, entries[key], box))
    return held


def _write(path: Path, entries: Mapping[str, Entry], held: Mapping[_Place, Tensor]) -> None:
    for (key, box), value in held.items():
        safetensors_file.write_box(path, entries[key], box, value)
    if held:  # each collector syncs its own pages: rank 0 cannot sync those of another node
        sync_file(safetensors_file.unfinished_path(path))


def _refuse_misfit(state: State, entries: Mapping[str, Entry]) -> None:
    faults = []
    for key, value in state.items():
        if key not in entries:
            faults.append(f"{key}: not in the file")
        elif isinstance(value, Fragment) and entries[key].shape != value.shape:
            faults.append(f"{key}: shape {entries[key].shape} in the file, {value.shape} in the model")
    if faults:
        raise CheckpointError(f"the file does not fit:\n{listed(faults)}")


def _packed(state: State) -> dict[str, Tensor]:
    """Values that are no tensors, pickled by ``torch.save``."""
    found = {}
    for key, value in state.items():
        if not isinstance(value, Fragment):
            refuse_objects(value, key, "Turn them into plain containers, numbers, strings or tensors.")
            buffer = io.BytesIO()
            torch.save(value, buffer)
            found[key] = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    return found


def _unpacked(path: Path, entry: Entry) -> Any:
    content = safetensors_file.read_part(path, entry, Box.whole(entry.shape))
    return torch.load(io.BytesIO(content.numpy().tobytes()), map_location="cpu", weights_only=True)
