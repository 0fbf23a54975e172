"""Comparison of tensors that several ranks hold, before they are saved."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

from torch import Tensor

from lightning_megatron.checkpoint.integrity.fault import Fault
from lightning_megatron.checkpoint.tensors.fragment import Fragment
from lightning_megatron.checkpoint.tensors.state_dict import State
from lightning_megatron.comm.all_ranks import on_all_ranks
from lightning_megatron.comm.objects import gather_object
from lightning_megatron.comm.p2p import as_bytes
from lightning_megatron.mesh import ParallelMesh

Digests = Mapping[tuple[str, tuple[int, ...], tuple[int, ...]], bytes]
"""Hashes of all boxes that a rank holds, by key, offsets and sizes."""


def differing_replicas(state: State, mesh: ParallelMesh, action: str) -> list[Fault]:
    """Tensors that differ between ranks that should hold the same; all ranks call this, rank 0 gets the faults."""
    if not mesh.is_distributed:
        return []
    by_rank = gather_object(mesh, on_all_ranks(mesh, action, lambda: digests(state)))
    return [] if by_rank is None else replica_faults(by_rank)


def digests(state: State) -> Digests:
    """Hashes of all boxes of the model and its optimizers that this rank holds, saved by it or by another rank."""
    return {
        (key, chunk.box.offsets, chunk.box.sizes): _digest(chunk.data)
        for key, fragment in state.items()
        if isinstance(fragment, Fragment)
        for chunk in fragment.chunks
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
    return blake2b(as_bytes(data).numpy().data, digest_size=8).digest()
