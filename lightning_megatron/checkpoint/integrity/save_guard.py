"""A checkpoint is looked at before it gets its name: what is found stops the save, and the last good one stays."""

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
"""Of every box that a rank holds, by key, offsets and sizes."""


@dataclass(frozen=True)
class SaveGuard:
    """What is looked at while a checkpoint is saved.

    Attributes:
        replicas: whether tensors that several ranks hold are compared between them, before anything is written.
        files: whether what was written is read again, before it gets its name.
    """

    replicas: bool = True
    files: bool = True

    def before_writing(self, state: State, mesh: ParallelMesh, doing: str) -> list[Fault]:
        """Tensors that ranks should hold alike and do not; all ranks call this, rank 0 is told."""
        if not self.replicas or not mesh.is_distributed:
            return []
        told = gather_object(mesh, on_all_ranks(mesh, doing, lambda: digests(state)))
        return [] if told is None else replica_faults(told)

    def before_publishing(self, directory: Path, mesh: ParallelMesh) -> list[Fault]:
        """Faults of the complete directory under its temporary name. Ranks share the files out, without collectives.

        Each rank reads what its neighbour wrote, so that a file system that does not show one rank's files to another
        is found out. A file's hash was made of the file; that it holds what was in memory, its check sums say.
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
    """A hash of every box of the model and its optimizers that this rank holds, also where another rank saves it."""
    return {
        (key, part.box.offsets, part.box.sizes): _digest(part.data)
        for key, fragment in state.items()
        if isinstance(fragment, Fragment)
        for part in fragment.parts
    }


def replica_faults(by_rank: list[Digests]) -> list[Fault]:
    """Boxes of which ranks hold different values, each with the ranks that differ from the first that has it."""
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
