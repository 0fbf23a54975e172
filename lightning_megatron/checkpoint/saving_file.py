"""Saving a checkpoint as the one file of Lightning's one-device strategies, from any layout.

Whole tensors go to rank 0 one after the other, and from there to the file: no rank holds more than the largest.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from lightning_megatron.checkpoint.directory.atomic_dir import discard, publish
from lightning_megatron.checkpoint.formats.lightning_content import RankPart, SavedName, content_of_file
from lightning_megatron.checkpoint.formats.lightning_file import record_faults
from lightning_megatron.checkpoint.formats.meta import NOTE
from lightning_megatron.checkpoint.formats.torch_file import TensorSlot, TorchFile
from lightning_megatron.checkpoint.integrity.fault import listed
from lightning_megatron.checkpoint.saving import PendingSave
from lightning_megatron.checkpoint.tensors.fragment import Chunk, Fragment, cover_fault, part_of
from lightning_megatron.comm.all_ranks import on_all_ranks
from lightning_megatron.comm.objects import all_gather_object, gather_object
from lightning_megatron.comm.p2p import as_bytes, receive, send
from lightning_megatron.device.memory import total_memory_bytes
from lightning_megatron.errors import CheckpointError
from lightning_megatron.files.durable import sync_file
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.params import Box

_log = logging.getLogger(__name__)
_FILE = "checkpoint"


@dataclass(frozen=True)
class PendingFile(PendingSave):
    """One rank's part of a single file that is about to be written.

    Attributes:
        names: names of the model on this rank, under ``state_dict``, and of its other versions under their keys.
    """

    names: Mapping[str, Sequence[SavedName]] = field(default_factory=dict)

    def _write_files(self, mesh: ParallelMesh) -> None:
        """Write the file into the temporary directory."""
        parts = gather_object(mesh, RankPart.of(self.names, self.state)) or []
        file = on_all_ranks(mesh, self.action, lambda: self._open(parts, mesh) if parts else None)
        faults: list[Exception] = []  # raised at the end, since other ranks go on sending and receiving
        for slot in all_gather_object(mesh, [] if file is None else file.slots)[0]:
            held = self._gathered(slot, [part.boxes.get(slot.key, ()) for part in parts], mesh, faults)
            try:
                if file is not None and not faults:
                    file.add(held)
            except Exception as error:
                faults.append(error)
            del held
        on_all_ranks(mesh, self.action, lambda: self._close(file, faults))

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

    def _open(self, parts: Sequence[RankPart], mesh: ParallelMesh) -> TorchFile:
        """On rank 0, begin the file."""
        for key, (_, shape) in {key: kind for part in parts for key, kind in part.kinds.items()}.items():
            if reason := cover_fault(shape, [box for part in parts for box in part.boxes.get(key, ())]):
                raise CheckpointError(f"{key}: {reason}")
        meta = torch.load(io.BytesIO(self.meta), map_location="cpu", weights_only=True)
        progress = None if self.progress is None else [self.progress.generation, self.progress.step]
        meta[NOTE] = {**meta.get(NOTE, {}), "layout": asdict(mesh.layout), "progress": progress}
        file = TorchFile(self._file, content_of_file(meta, parts, has_stages=mesh.pp.size > 1))
        needed, key = max(((_needed(slot, parts), slot.key) for slot in file.slots), default=(0, ""))
        _log.info("%s: rank 0 takes at most %d bytes of host memory for it", self.action, needed)
        if needed > (host := total_memory_bytes("cpu")):
            raise CheckpointError(
                f"{key} is whole on rank 0 while it is written to one file: that takes {needed} bytes, and the host has"
                f" {host}. Save directories, without save_distributed_checkpoint=False"
            )
        return file

    def _gathered(
        self, slot: TensorSlot, by_rank: Sequence[Sequence[Box]], mesh: ParallelMesh, faults: list[Exception]
    ) -> Tensor:
        """The whole tensor on rank 0; the others send what they save of it, in the order of their boxes."""
        fragment = self.state.get(slot.key)
        own = [chunk for chunk in fragment.chunks if chunk.write] if isinstance(fragment, Fragment) else []
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
                place = part_of(whole, box)
                data = torch.empty(place.nbytes, dtype=torch.uint8) if rank else _bytes_of(own[number], faults)
                if rank and data.numel():
                    receive(data, mesh.host, rank)
                place.copy_(data.view(slot.dtype).view(box.sizes))
        return whole

    def _close(self, file: TorchFile | None, faults: Sequence[Exception]) -> None:
        if faults:
            raise faults[0]
        if file is not None:
            file.close()
            sync_file(self._file)


def _needed(slot: TensorSlot, parts: Sequence[RankPart]) -> int:
    """Bytes of a tensor on rank 0 while it is assembled: the whole tensor, and the largest part that is received."""
    boxes = (box for part in parts for box in part.boxes.get(slot.key, ()))
    return slot.nbytes + slot.dtype.itemsize * max(prod(box.sizes) for box in boxes)


def _bytes_of(chunk: Chunk, faults: list[Exception]) -> Tensor:
    """The bytes of a chunk; zeros, and a fault, if it cannot be read."""
    try:
        return as_bytes(chunk.data)
    except Exception as error:
        faults.append(error)
        return torch.zeros(chunk.data.nbytes, dtype=torch.uint8)
