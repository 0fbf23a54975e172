"""A checkpoint on its way to the disk: what is to be written, and the steps until it has its name."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_megatron.checkpoint.all_ranks import on_all_ranks
from lightning_megatron.checkpoint.dcp_planner import PER_RANK
from lightning_megatron.checkpoint.dcp_storage import write
from lightning_megatron.checkpoint.directory.atomic_dir import (
    UNFINISHED,
    discard,
    place_for,
    prepare,
    publish,
    sync_file,
)
from lightning_megatron.checkpoint.directory.leftovers import sweep
from lightning_megatron.checkpoint.fragment import Fragment
from lightning_megatron.checkpoint.integrity.fault import listed
from lightning_megatron.checkpoint.integrity.manifest import MANIFEST, FileRecord, Manifest, Progress, record
from lightning_megatron.checkpoint.integrity.metadata_file import METADATA
from lightning_megatron.checkpoint.integrity.save_guard import SaveGuard
from lightning_megatron.checkpoint.integrity.verify import size_faults
from lightning_megatron.checkpoint.lazy_tensor import LazyTensor
from lightning_megatron.checkpoint.meta import META, refuse_objects, render_meta, write_meta
from lightning_megatron.checkpoint.plain import plain
from lightning_megatron.checkpoint.state_dict import State
from lightning_megatron.comm.objects import all_gather_object
from lightning_megatron.errors import CheckpointError
from lightning_megatron.mesh import ParallelMesh


@dataclass(frozen=True)
class Draft:
    """What one rank is about to save.

    Attributes:
        path: the directory to make.
        temporary: where it lies until it is whole: a name that no other save has, the same on all ranks.
        state: what this rank holds; live memory, unless somebody has copied it.
        meta: content of ``meta.pt``; nothing on ranks that do not write it.
        progress: how far the run has come, where the checkpoint is of one.
        guard: looks at the state before it is written, and at the files before they get their name.
    """

    path: Path
    temporary: Path
    state: State
    meta: bytes
    progress: Progress | None = None
    guard: SaveGuard | None = None

    @classmethod
    def of(
        cls,
        path: str | os.PathLike[str],
        state: State,
        meta: dict[str, Any],
        mesh: ParallelMesh,
        *,
        per_rank: Any = None,
        allow_objects: bool = False,
        guard: SaveGuard | None = None,
        progress: Progress | None = None,
    ) -> Draft:
        """Put a checkpoint together; arguments as of :func:`save`. Every rank must call this.

        Raises:
            CheckpointError: on every rank, if any rank's values could not be read again.
        """
        whole = dict(state)
        if per_rank is not None:
            whole[own_key(mesh)] = per_rank

        def render() -> bytes:
            for key, value in whole.items():
                if not isinstance(value, Fragment | LazyTensor):
                    refuse_objects(value, key, "Turn them into plain containers, numbers, strings or tensors.")
            if mesh.rank:
                return b""
            return render_meta(meta if allow_objects else plain(meta), allow_objects)

        content = on_all_ranks(mesh, f"saving {path}", render)
        name = all_gather_object(mesh, place_for(Path(path), "saving").name if mesh.rank == 0 else "")[0]
        return cls(Path(path), Path(path).parent / UNFINISHED / name, whole, content, progress, guard)

    @property
    def doing(self) -> str:
        """For error texts."""
        return f"saving {self.path}"


def complete(draft: Draft, mesh: ParallelMesh) -> None:
    """Write a draft and give it its name when it is whole and on the disk. Every rank must call this.

    Raises:
        CheckpointError: on every rank, if anything failed on any; what had the name before is then untouched.
    """
    path, temporary, guard, doing = draft.path, draft.temporary, draft.guard, draft.doing

    def begin() -> None:
        if replica_faults:
            raise CheckpointError("ranks do not hold the same:\n" + listed(replica_faults))
        if mesh.rank == 0:
            sweep(path.parent)
            prepare(path, temporary)
            write_meta(temporary, draft.meta)

    def hash_own_files() -> dict[str, FileRecord]:
        own = {file.name for file in temporary.glob(f"__{mesh.rank}_*.distcp")} | written.keys()
        if mesh.rank == 0:
            own |= {META, METADATA}
        found = {name: record(temporary / name) for name in sorted(own) if (temporary / name).is_file()}
        if lost := [name for name in sorted(own) if name not in found or found[name].bytes < written.get(name, 0)]:
            raise CheckpointError(f"{', '.join(lost)}: written, but now gone or shorter: the disk or somebody lost it")
        return found

    def add_manifest() -> None:
        if mesh.rank == 0:
            files = {name: entry for found in records for name, entry in found.items()}
            _write_manifest(temporary, Manifest(asdict(mesh.layout), files, torch.__version__, progress=draft.progress))

    def look_again() -> None:
        if guard is not None and (faults := guard.before_publishing(temporary, mesh)):
            raise CheckpointError("what was written is damaged:\n" + listed(faults))

    replica_faults = [] if guard is None else guard.before_writing(draft.state, mesh, doing)
    try:
        on_all_ranks(mesh, doing, begin)
        written = write(temporary, draft.state, mesh, doing)
        records = all_gather_object(mesh, on_all_ranks(mesh, doing, hash_own_files))
        on_all_ranks(mesh, doing, add_manifest)
        on_all_ranks(mesh, doing, look_again)
        on_all_ranks(mesh, doing, lambda: publish(temporary, path) if mesh.rank == 0 else None)
    except BaseException:
        if mesh.rank == 0:
            discard(temporary)
        raise


def own_key(mesh: ParallelMesh) -> str:
    """Key of what only a rank at the same coordinate of the same layout can use."""
    return f"{PER_RANK}.pp{mesh.pp.rank}-dp{mesh.dp.rank}-cp{mesh.cp.rank}-tp{mesh.tp.rank}"


def _write_manifest(directory: Path, manifest: Manifest) -> None:
    if faults := size_faults(directory, manifest):
        text = listed(faults)
        if any(fault.what == "missing" for fault in faults):
            text += "\nrank 0 does not see files that other ranks wrote: all must share one file system"
        raise CheckpointError(text)
    file = directory / MANIFEST
    file.write_text(manifest.render())
    sync_file(file)
