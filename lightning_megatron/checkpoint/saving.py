"""Saving a checkpoint: :func:`save` builds a :class:`PendingSave` and writes it.

It writes the files of torch.distributed.checkpoint, ``meta.pt`` and a manifest under a temporary name. The directory
gets its final name when it is complete, checked and on the disk. ``README.md`` in this folder lists the steps.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from lightning_megatron.checkpoint.dcp.fragments import write_fragments
from lightning_megatron.checkpoint.directory.atomic_dir import UNFINISHED, discard, place_for, prepare, publish
from lightning_megatron.checkpoint.directory.leftovers import remove_stale
from lightning_megatron.checkpoint.formats.meta import META, refuse_objects, render_meta, write_meta
from lightning_megatron.checkpoint.formats.plain import plain
from lightning_megatron.checkpoint.integrity.fault import Fault, listed
from lightning_megatron.checkpoint.integrity.finite_values import refuse_nonfinite
from lightning_megatron.checkpoint.integrity.manifest import MANIFEST, FileRecord, Manifest, Progress, record
from lightning_megatron.checkpoint.integrity.replicas import differing_replicas
from lightning_megatron.checkpoint.select.verify import size_faults, written_faults
from lightning_megatron.checkpoint.tensors.fragment import Fragment
from lightning_megatron.checkpoint.tensors.keys import rank_key
from lightning_megatron.checkpoint.tensors.lazy_tensor import LazyTensor
from lightning_megatron.checkpoint.tensors.state_dict import State
from lightning_megatron.comm.all_ranks import on_all_ranks
from lightning_megatron.comm.objects import all_gather_object
from lightning_megatron.errors import CheckpointError
from lightning_megatron.files.durable import sync_file
from lightning_megatron.mesh import ParallelMesh

PendingT = TypeVar("PendingT", bound="PendingSave")


def save(
    path: str | os.PathLike[str],
    state: State,
    meta: dict[str, Any],
    mesh: ParallelMesh,
    *,
    per_rank: Any = None,
    allow_objects: bool = False,
    guard: SaveGuard | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a checkpoint and give it its name when it is complete and on the disk. Every rank must call this.

    An older checkpoint of that name stays as it is until then, and is replaced as a whole.

    Args:
        path: the directory to make, on a file system that all ranks share.
        state: this rank's fragments of the model and the optimizers; on a single rank also tensors that are read
            while they are written (:class:`~lightning_megatron.checkpoint.tensors.lazy_tensor.LazyTensor`).
        meta: small values, equal on all ranks; those of rank 0 are saved.
        mesh: ranks that save together.
        per_rank: values for the rank at the same coordinates of the same layout, such as its random streams.
        allow_objects: permission for objects in ``meta`` that only ``load(..., weights_only=False)`` can read.
        guard: checks of the state before it is written and of the files before they get their name.
        progress: progress of the run, by which the newest checkpoint of a folder is found.

    Raises:
        CheckpointError: on every rank, if anything failed on any; an older checkpoint is then untouched.
    """
    options = {"per_rank": per_rank, "allow_objects": allow_objects, "guard": guard, "progress": progress}
    PendingSave.of(path, state, meta, mesh, **options).write(mesh)


@dataclass(frozen=True)
class SaveGuard:
    """The checks of a save.

    Attributes:
        replicas: True to compare tensors that several ranks hold, before anything is written.
        files: True to read the written files again, before the checkpoint gets its name.
    """

    replicas: bool = True
    files: bool = True


@dataclass(frozen=True)
class PendingSave:
    """One rank's part of a checkpoint that is about to be written.

    Attributes:
        path: final name of the directory.
        temporary: directory to write into, equal on all ranks; no other save has this name.
        state: fragments and values of this rank; live memory, or a copy of it.
        meta: content of ``meta.pt``; empty on all ranks but the first.
        progress: progress of the run; ``None`` for a checkpoint outside a run.
        guard: checks of the state before it is written and of the files before they get their name.
        late: keys of optimizer state in host memory; only optimizer steps and loads write it, so it may be copied after
            the save has returned.
        finite: True to refuse late values that are NaN or infinite; the others have been checked.
    """

    path: Path
    temporary: Path
    state: State
    meta: bytes
    progress: Progress | None = None
    guard: SaveGuard | None = None
    late: frozenset[str] = frozenset()
    finite: bool = False

    @classmethod
    def of(
        cls: type[PendingT],
        path: str | os.PathLike[str],
        state: State,
        meta: dict[str, Any],
        mesh: ParallelMesh,
        *,
        per_rank: Any = None,
        allow_objects: bool = False,
        guard: SaveGuard | None = None,
        progress: Progress | None = None,
    ) -> PendingT:
        """Build it from the arguments of :func:`save`. Every rank must call this.

        Raises:
            CheckpointError: on every rank, if the values of any rank could not be loaded again.
        """
        state = dict(state)
        if per_rank is not None:
            state[own_key(mesh)] = per_rank

        def render() -> bytes:
            for key, value in state.items():
                if not isinstance(value, Fragment | LazyTensor):
                    refuse_objects(value, key, "Turn them into plain containers, numbers, strings or tensors.")
            if mesh.rank:
                return b""
            return render_meta(meta if allow_objects else plain(meta), allow_objects)

        content = on_all_ranks(mesh, f"saving {path}", render)
        name = all_gather_object(mesh, place_for(Path(path), "saving").name if mesh.rank == 0 else "")[0]
        return cls(Path(path), Path(path).parent / UNFINISHED / name, state, content, progress, guard)

    @property
    def action(self) -> str:
        """Name of the operation, for error texts."""
        return f"saving {self.path}"

    def write(self, mesh: ParallelMesh) -> None:
        """Write the files, check them and give the directory its final name. Every rank must call this.

        Raises:
            CheckpointError: on every rank, if anything failed on any; an older checkpoint of that name is then
                untouched.
        """
        action, temporary = self.action, self.temporary
        guard = self.guard or SaveGuard(replicas=False, files=False)
        differing = differing_replicas(self.state, mesh, action) if guard.replicas else []
        try:
            on_all_ranks(mesh, action, lambda: self._begin(differing, mesh))
            self._write_files(mesh)
            if guard.files:
                on_all_ranks(mesh, action, lambda: self._check_files(mesh))
            on_all_ranks(mesh, action, lambda: self._publish() if mesh.rank == 0 else None)
        except BaseException:
            if mesh.rank == 0:
                discard(temporary)
            raise

    def _begin(self, differing: Sequence[Fault], mesh: ParallelMesh) -> None:
        """Refuse what must not be saved; on rank 0, clear leftovers and make the directory."""
        if differing:
            raise CheckpointError("ranks do not hold the same:\n" + listed(differing))
        if self.finite:
            refuse_nonfinite({key: value for key, value in self.state.items() if key in self.late}, ())
        if mesh.rank == 0:
            remove_stale(self.path.parent)
            prepare(self.path, self.temporary)

    def _write_files(self, mesh: ParallelMesh) -> None:
        """Write all files into the temporary directory."""
        on_all_ranks(mesh, self.action, lambda: None if mesh.rank else write_meta(self.temporary, self.meta))
        records = all_gather_object(mesh, write_fragments(self.temporary, self.state, mesh, self.action))
        on_all_ranks(mesh, self.action, lambda: self._write_manifest(records, mesh))

    def _write_manifest(self, records: Sequence[Mapping[str, FileRecord]], mesh: ParallelMesh) -> None:
        """On rank 0, write ``manifest.json`` from the records of all ranks, if their files are all visible."""
        if mesh.rank:
            return
        files = {name: entry for found in records for name, entry in found.items()}
        files[META] = record(self.temporary / META)
        manifest = Manifest(asdict(mesh.layout), files, torch.__version__, progress=self.progress)
        if faults := size_faults(self.temporary, manifest):
            text = listed(faults)
            if any(fault.what == "missing" for fault in faults):
                text += "\nrank 0 does not see files that other ranks wrote: all must share one file system"
            raise CheckpointError(text)
        file = self.temporary / MANIFEST
        file.write_text(manifest.render())
        sync_file(file)

    def _check_files(self, mesh: ParallelMesh) -> None:
        """Read the written files again, each on another rank than the one that wrote it."""
        if faults := written_faults(self.temporary, mesh):
            raise CheckpointError("what was written is damaged:\n" + listed(faults))

    def _publish(self) -> None:
        """Give what was written its final name; rank 0 calls this."""
        publish(self.temporary, self.path)


def own_key(mesh: ParallelMesh) -> str:
    """Key of the values that only the rank at these coordinates of the same layout can use."""
    return rank_key(mesh.pp.rank, mesh.dp.rank, mesh.cp.rank, mesh.tp.rank)
