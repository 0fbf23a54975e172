"""Checks of a checkpoint before it gets its name: a fault stops the save, and the last good checkpoint stays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from lightning_megatron.checkpoint.all_ranks import on_all_ranks
from lightning_megatron.checkpoint.fragment import Fragment
from lightning_megatron.checkpoint.integrity.fault import Fault
from lightning_megatron.checkpoint.integrity.manifest import read_manifest
from lightning_megatron.checkpoint.integrity.metadata_file import read_metadata
from lightning_megatron.checkpoint.integrity.verify import hash_faults, item_faults, metadata_faults, size_faults
from lightning_megatron.checkpoint.state_dict import State
from lightning_megatron.comm.objects import gather_object
from lightning_megatron.mesh import ParallelMesh

Digests = Mapping[tuple[str, tuple[int, ...], tuple[int, ...]], bytes]
"""Hashes of all boxes that a rank holds, by key, offsets and sizes."""


@dataclass(frozen=True)
class SaveGuard:
    """The checks of a save.

    Attributes:
        replicas: True to compare tensors that several ranks hold, before anything is written.
        files: True to read the written files again, before the checkpoint gets its name.
    """

    replicas: bool = True
    files: bool = True

    def before_writing(self, state: State, mesh: ParallelMesh, action: str) -> list[Fault]:
        """Tensors that differ between ranks that should hold the same; all ranks call this, rank 0 gets the faults."""
        if not self.replicas or not mesh.is_distributed:
            return []
        by_rank = gather_object(mesh, on_all_ranks(mesh, action, lambda: digests(state)))
        return [] if by_rank is None else replica_faults(by_rank)

    def before_publishing(self, directory: Path, mesh: ParallelMesh) -> list[Fault]:
        """Faults of the complete directory under its temporary name. Ranks divide the files, without collectives.

        Each rank reads the files of its neighbour, which finds file systems that hide one rank's files from another.
        A file's hash was made from the file; the check sums inside show that it holds what was in memory.
        """
        if not self.files:
            return []
        manifest = read_manifest(directory)
        names = sorted(manifest.files)[(mesh.rank + 1) % mesh.world.size :: mesh.world.size]
        faults = size_faults(directory, manifest) if mesh.rank == 0 else []
        faults = faults or hash_faults(directory, manifest, names)
        if not faults and torch.serialization.get_crc32_options():
            faults = item_faults(directory, read_metadata(directory), names)
        return faults or (metadata_faults(directory, manifest) if mesh.rank == 0 else [])


def digests(state: State) -> Digests:
    """Hashes of all boxes of the model and its optimizers that this rank holds, saved by it or by another rank."""
    return {
        (key, part.box.offsets, part.box.sizes): _digest(part.data)
        for key, fragment in state.items()
        if isinstance(fragment, Fragment)
        for part in fragment.parts
    }


def replica_faults(by_rank: list[Digests]) -> list[Fault]:
    """Boxes with different values on different ranks, each with the ranks that differ from the first one."""
    first: dict[tuple[str, tuple[int, ...], tuple[int, ...]], int] = {}
    differing: dict[tuple[str, int], list[int]] = {}
    for rank, own in enumerate(by_rank):
        for place, digest in own.items():
            owner = first.setdefault(place, rank)
            if by_rank[owner][place] != digest:
                ranks = differing.setdefault((place[0], owner), [])
                if rank not in ranks:
                    ranks.append(rank)
    return [
        Fault("in memory", f"ranks {', '.join(map(str, ranks))} hold other values than rank {owner}", (key,))
        for (key, owner), ranks in differing.items()
    ]


def _digest(data: Tensor) -> bytes:
    content = data.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return blake2b(content.numpy().data, digest_size=8).digest()
