"""Saving a checkpoint as the one file of Lightning's one-device strategies, from any layout.

Whole tensors go to rank 0 one after the other, and from there to the file: no rank holds more than the largest.
"""

from __future__ import annotations

import io
import logging
import re
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count, takewhile
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_megatron.checkpoint.directory.atomic_dir import discard, publish, sync_file
from lightning_megatron.checkpoint.formats.lightning_file import MODEL_STATE, OPTIMIZERS, record_faults
from lightning_megatron.checkpoint.formats.meta import NOTE
from lightning_megatron.checkpoint.formats.torch_file import Slot, TorchFile
from lightning_megatron.checkpoint.integrity.fault import listed
from lightning_megatron.checkpoint.saving import PendingSave
from lightning_megatron.checkpoint.tensors.fragment import Chunk, Fragment, cover_fault
from lightning_megatron.checkpoint.tensors.keys import Key, groups_key, optimizer_family
from lightning_megatron.comm.all_ranks import on_all_ranks
from lightning_megatron.comm.objects import all_gather_object, gather_object
from lightning_megatron.comm.p2p import as_bytes, receive, send
from lightning_megatron.device.memory import total_memory_bytes
from lightning_megatron.errors import CheckpointError
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.params import NO_PARAMETER, Box

_log = logging.getLogger(__name__)
_FILE = "checkpoint"
_Kind = tuple[torch.dtype, tuple[int, ...]]


class Entry(NamedTuple):
    """A name of a ``state_dict``.

    Attributes:
        name: the name.
        key: key under which the state has its value.
        shape: shape of it in a model on one rank, padding included.
    """

    name: str
    key: str
    shape: tuple[int, ...]


class _Part(NamedTuple):
    """What one rank holds, without the values of tensors.

    Attributes:
        entries: names of the model and of its other versions on this rank.
        kinds: dtype and shape of each tensor of the state.
        boxes: boxes of it that this rank saves.
        plain: all other values.
    """

    entries: Mapping[str, Sequence[Entry]]
    kinds: Mapping[str, _Kind]
    boxes: Mapping[str, Sequence[Box]]
    plain: Mapping[str, Any]


@dataclass(frozen=True)
class PendingFile(PendingSave):
    """One rank's part of a single file that is about to be written.

    Attributes:
        entries: names of the model on this rank, under ``state_dict``, and of its other versions under their keys.
    """

    entries: Mapping[str, Sequence[Entry]] = field(default_factory=dict)

    def _write_files(self, mesh: ParallelMesh) -> None:
        """Write the file into the temporary directory."""
        saved = {key: _saved(value) for key, value in self.state.items() if isinstance(value, Fragment)}
        kinds = {key: (value.dtype, value.shape) for key, value in self.state.items() if isinstance(value, Fragment)}
        plain = {key: value for key, value in self.state.items() if key not in kinds}
        boxes = {key: [chunk.box for chunk in chunks] for key, chunks in saved.items()}
        parts = gather_object(mesh, _Part(self.entries, kinds, boxes, plain)) or []
        file = on_all_ranks(mesh, self.action, lambda: self._open(parts, mesh) if parts else None)
        faults: list[Exception] = []  # raised in the end, since other ranks go on sending and receiving
        for slot in all_gather_object(mesh, file.slots if file is not None else [])[0]:
            by_rank = [part.boxes.get(slot.key, ()) for part in parts]
            held = _gathered(slot, saved.get(slot.key, ()), by_rank, mesh, faults)
            try:
                if file is not None and not faults:
                    file.add(held)
            except Exception as error:
                faults.append(error)
            del held

        def finish() -> None:
            if faults:
                raise faults[0]
            if file is not None:
                file.close()
                sync_file(self._file)

        on_all_ranks(mesh, self.action, finish)

    def _check_files(self, mesh: ParallelMesh) -> None:
        """Read the written file again; the ranks divide its records."""
        if faults := record_faults(self._file, mesh.rank, mesh.world.size):
            raise CheckpointError("what was written is damaged:\n" + listed(faults))

    def _publish(self) -> None:
        """Give the file its final name; rank 0 calls this."""
        publish(self._file, self.path)
        discard(self.temporary)

    @property
    def _file(self) -> Path:
        return self.temporary / _FILE

    def _open(self, parts: Sequence[_Part], mesh: ParallelMesh) -> TorchFile:
        """On rank 0, begin the file."""
        kinds = {key: kind for part in parts for key, kind in part.kinds.items()}
        for key, (_, shape) in kinds.items():
            if reason := cover_fault(shape, [box for part in parts for box in part.boxes.get(key, ())]):
                raise CheckpointError(f"{key}: {reason}")
        file = TorchFile(self._file, self._content(parts, kinds, mesh))
        needed, key = max(((_needed(slot, parts), slot.key) for slot in file.slots), default=(0, ""))
        _log.info("%s: rank 0 takes at most %d bytes of host memory for it", self.action, needed)
        if needed > (host := total_memory_bytes("cpu")):
            raise CheckpointError(
                f"{key} is whole on rank 0 while it is written to one file: that takes {needed} bytes, and the host has"
                f" {host}. Save directories, without save_distributed_checkpoint=False"
            )
        return file

    def _content(self, parts: Sequence[_Part], kinds: Mapping[str, _Kind], mesh: ParallelMesh) -> dict[str, Any]:
        """Lightning's dictionary, with slots in the place of tensors."""
        padded = {
            Key.parse(e.key).name: e.shape for part in parts for entries in part.entries.values() for e in entries
        }
        values: dict[str, Any] = {key: value for part in parts for key, value in part.plain.items()}
        own = {key: value for key, value in values.items() if Key.parse(key).is_of_rank}
        for key, (dtype, shape) in kinds.items():
            values[key] = Slot(key, dtype, padded[Key.parse(key).name] if shape else shape)
        content = torch.load(io.BytesIO(self.meta), map_location="cpu", weights_only=True)
        for version in self.entries:
            entries = [part.entries[version] for part in parts]
            keys = {entry.name: entry.key for held in entries for entry in held}
            names = in_order_of_definition([[entry.name for entry in held] for held in entries])
            content[version] = OrderedDict((name, values[keys[name]]) for name in names)
        if OPTIMIZERS in content:
            place = {name: number for number, name in enumerate(content[MODEL_STATE])}
            has_state, is_whole = bool(content.get("global_step")), mesh.pp.size == 1
            groups = [values[groups_key(index)] for index in takewhile(lambda i: groups_key(i) in values, count())]
            content[OPTIMIZERS] = [
                _numbered(each if is_whole else _sorted(each, place), _state_of(index, values) if has_state else {})
                for index, each in enumerate(groups)
            ]
        progress = None if self.progress is None else [self.progress.generation, self.progress.step]
        note = {"layout": asdict(mesh.layout), "progress": progress, "per_rank": own}
        return content | {NOTE: content.get(NOTE, {}) | note}


def _saved(fragment: Fragment) -> list[Chunk]:
    return [chunk for chunk in fragment.chunks if chunk.write]


def _needed(slot: Slot, parts: Sequence[_Part]) -> int:
    """Bytes of a tensor on rank 0 while it is put together: the whole, and the largest part that comes for it."""
    return slot.nbytes + slot.dtype.itemsize * max(
        prod(box.sizes) for part in parts for box in part.boxes.get(slot.key, ())
    )


def _gathered(
    slot: Slot, own: Sequence[Chunk], by_rank: Sequence[Sequence[Box]], mesh: ParallelMesh, faults: list[Exception]
) -> Tensor:
    """The whole tensor on rank 0; the others send what they save of it, in the order of their boxes."""
    if mesh.rank:
        for chunk in own:
            if chunk.data.numel():
                send(_bytes_of(chunk, faults), mesh.host, 0)
        return torch.empty(0)
    if len(own) == 1 and own[0].box.sizes == slot.shape:
        return own[0].data
    whole = torch.zeros(slot.shape, dtype=slot.dtype)
    for rank, boxes in enumerate(by_rank):
        for number, box in enumerate(boxes):
            place = whole[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
            data = torch.empty(place.nbytes, dtype=torch.uint8) if rank else _bytes_of(own[number], faults)
            if rank and data.numel():
                receive(data, mesh.host, rank)
            place.copy_(data.view(slot.dtype).view(box.sizes))
    return whole


def _bytes_of(chunk: Chunk, faults: list[Exception]) -> Tensor:
    """The bytes of a chunk; zeros, with a fault, where it cannot be read."""
    try:
        return as_bytes(chunk.data)
    except Exception as error:
        faults.append(error)
        return torch.zeros(chunk.data.nbytes, dtype=torch.uint8)


def in_order_of_definition(stages: Sequence[Sequence[str]]) -> list[str]:
    """Names of a model that is divided over pipeline stages in the order in which one process has them.

    The order on each stage stays. Of two names that are alike up to a number, such as those of layers, that with the
    smaller number comes first; otherwise that of the earlier stage.

    Args:
        stages: names on each rank.
    """
    found: dict[str, None] = {}
    rest = [deque(names) for names in dict.fromkeys(map(tuple, stages))]
    while rest := [names for names in rest if names]:
        first = rest[0]
        for names in rest[1:]:
            if _is_before(names[0], first[0]):
                first = names
        found[first.popleft()] = None
        for names in rest:
            while names and names[0] in found:  # copies of the first stage's embedding, and stages on several ranks
                names.popleft()
    return list(found)


def _is_before(name: str, other: str) -> bool:
    (prefix, number), (others, others_number) = map(_first_number, (name, other))
    return prefix == others and number < others_number


def _first_number(name: str) -> tuple[str, int]:
    match = re.match(r"(\D*)(\d+)", name)
    return (match[1], int(match[2])) if match is not None else (name, 0)


def _sorted(groups: Sequence[Mapping[str, Any]], place: Mapping[str, int]) -> list[Mapping[str, Any]]:
    """Groups of all stages, whose parameters come stage by stage, in order of definition."""
    return [{**group, "params": sorted(group["params"], key=place.__getitem__)} for group in groups]


def _state_of(index: int, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """State of an optimizer by name of the parameter; main values are in the model's place."""
    found: dict[str, dict[str, Any]] = {}
    for text, value in values.items():
        key = Key.parse(text)
        if key.family == optimizer_family(index) and key.state and not key.is_main:
            found.setdefault(key.name, {}).update(value if key.is_whole else {key.state: value})
    return found


def _numbered(groups: Sequence[Mapping[str, Any]], state: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The result of ``Optimizer.state_dict()``: parameters have numbers, group by group."""
    names = [name for group in groups for name in group["params"]]
    numbers = iter(range(len(names)))
    told = [{**group, "params": [next(numbers) for _ in group["params"]]} for group in groups]
    kept = {number: dict(state[name]) for number, name in enumerate(names) if state.get(name)}
    beside = state.get(NO_PARAMETER, {})
    return {**beside, "state": kept | beside.get("state", {}), "param_groups": told}
