"""Check of a checkpoint's files against its manifest, by all ranks together, before any tensor is loaded.

The ranks divide the bytes: each hashes one contiguous range of all files, laid end to end in the order of the ranks
that wrote them. So every byte is read once in the job, and under an unchanged layout mostly by the rank that needs it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from lightning_megatron.checkpoint.formats.lightning_file import record_faults
from lightning_megatron.checkpoint.formats.meta import META
from lightning_megatron.checkpoint.integrity.block_sums import BLOCK, FileRange, check_sums
from lightning_megatron.checkpoint.integrity.fault import Fault
from lightning_megatron.checkpoint.integrity.manifest import Manifest, hash_of
from lightning_megatron.checkpoint.integrity.metadata_file import METADATA
from lightning_megatron.checkpoint.select.newest import locate
from lightning_megatron.checkpoint.select.verify import hash_faults, size_faults
from lightning_megatron.comm.all_ranks import on_all_ranks
from lightning_megatron.comm.objects import all_gather_object
from lightning_megatron.mesh import ParallelMesh

Check = Literal["sizes", "hashes"]
"""``"sizes"``: lengths of all files, and content of those that every rank reads; ``"hashes"``: content of all files."""


_Sums = Mapping[tuple[str, int], bytes]
"""Checksums of file ranges, by name of the file and first byte."""


class _Found(NamedTuple):
    """Findings of one rank: faults, and the check sums of its file ranges."""

    faults: list[Fault]
    sums: _Sums


def faults_of(path: Path, mesh: ParallelMesh, check: Check = "hashes") -> list[Fault]:
    """Files that differ from what was written; the same list on all ranks. All call this, and share the reading.

    For a single file of Lightning's: the records whose check sums are wrong.

    Raises:
        CheckpointError: on every rank, if there is no checkpoint, or a rank cannot read it.
    """
    return compared(path, mesh, check)[1]


def compared(
    path: Path, mesh: ParallelMesh, check: Check, known: Manifest | None = None
) -> tuple[Manifest | None, list[Fault]]:
    """The manifest of a checkpoint, ``None`` for a single file, and the faults of :func:`faults_of`.

    The check by ``"sizes"`` is skipped with ``known``, the manifest of a checkpoint that has already passed it here.
    """

    def look() -> tuple[Manifest | None, _Found]:
        if path.is_file():
            return None, _Found(record_faults(path, mesh.rank, mesh.world.size) if check == "hashes" else [], {})
        manifest = known or locate(path)
        faults = [] if known else size_faults(path, manifest) or hash_faults(path, manifest, _read_by_all(manifest))
        if faults or check == "sizes":
            return manifest, _Found(faults, {})
        own = ranges_by_rank({name: entry.bytes for name, entry in manifest.files.items()}, mesh.world.size)[mesh.rank]
        sums = {(name, start): check_sums([FileRange(path / name, start, end)]) for name, start, end in own}
        return manifest, _Found([], sums)

    manifest, own = on_all_ranks(mesh, f"loading {path}", look)
    found = all_gather_object(mesh, own)
    faults = list(dict.fromkeys(fault for rank in found for fault in rank.faults))
    if faults or manifest is None or check == "sizes":
        return manifest, faults
    return manifest, _altered(manifest, [rank.sums for rank in found])


def ranges_by_rank(lengths: Mapping[str, int], num_ranks: int) -> list[list[tuple[str, int, int]]]:
    """File ranges for each rank: name, first byte and end. Their lengths differ by one block at most.

    ``lengths`` are the bytes of each file, by name.
    """
    names = sorted(lengths, key=_by_numbers)
    blocks = [-(-lengths[name] // BLOCK) for name in names]
    total, found, passed = sum(blocks), [list[tuple[str, int, int]]() for _ in range(num_ranks)], 0
    for name, count in zip(names, blocks, strict=True):
        for rank, ranges in enumerate(found):
            first = max(total * rank // num_ranks - passed, 0)
            end = min(total * (rank + 1) // num_ranks - passed, count)
            if first < end:
                ranges.append((name, first * BLOCK, min(end * BLOCK, lengths[name])))
        passed += count
    return found


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """Sort key under which ``__10_0`` comes after ``__9_0``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _read_by_all(manifest: Manifest) -> list[str]:
    return [name for name in (META, METADATA) if name in manifest.files]


def _altered(manifest: Manifest, by_rank: Sequence[_Sums]) -> list[Fault]:
    readers: dict[str, list[tuple[int, int]]] = {name: [] for name in manifest.files}
    for rank, sums in enumerate(by_rank):
        for name, start in sums:
            readers[name].append((start, rank))
    faults = []
    for name, entry in sorted(manifest.files.items()):
        ranges = sorted(readers[name])
        if hash_of(b"".join(by_rank[rank][name, start] for start, rank in ranges)) != entry.hash:
            by = f" (read by rank {', '.join(str(rank) for _, rank in ranges)})" if len(by_rank) > 1 else ""
            faults.append(Fault(name, f"altered: its hash is not the one that was written{by}"))
    return faults
