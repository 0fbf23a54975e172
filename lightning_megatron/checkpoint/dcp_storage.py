"""Bytes between fragments and the files of torch.distributed.checkpoint.

The order of calls is the one that DCP's ``StorageWriter`` and ``StorageReader`` document. ``dcp.save`` and ``dcp.load``
make the same calls, but their arguments changed from torch 2.6 on, they refuse to serve one process of a larger job
there, and they raise what ``except Exception`` does not catch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from lightning_megatron.checkpoint.all_ranks import on_all_ranks
from lightning_megatron.checkpoint.dcp_planner import FragmentLoadPlanner, FragmentSavePlanner
from lightning_megatron.checkpoint.formats.unpacked_size import refuse_packed_items
from lightning_megatron.checkpoint.lazy_tensor import LazyTensor
from lightning_megatron.checkpoint.state_dict import State
from lightning_megatron.comm.objects import gather_object, scatter_object
from lightning_megatron.mesh import ParallelMesh


def write(directory: Path, state: State, mesh: ParallelMesh, doing: str) -> Mapping[str, int]:
    """Write a state as ``.metadata`` and one ``__R_0.distcp`` a rank. Every rank must call this.

    Tensors that are made while they are written have a file each: DCP keeps what it writes until it closes the file.

    Returns:
        Files that this rank has written, with the bytes that each has at least.

    Raises:
        CheckpointError: on every rank, if any step failed on any.
    """
    streams = any(isinstance(value, LazyTensor) for value in state.values())
    planner = FragmentSavePlanner()
    writer = FileSystemWriter(directory, single_file_per_rank=not streams, sync_files=True)
    leads = mesh.rank == 0

    def plan_own() -> SavePlan:
        planner.set_up_planner(state, writer.storage_meta(), leads)
        writer.set_up_storage_writer(leads)
        return writer.prepare_local_plan(planner.create_local_plan())

    def plan_all() -> tuple[list[SavePlan], Metadata] | None:
        if plans is None:
            return None
        adjusted, metadata = planner.create_global_plan(plans)
        return writer.prepare_global_plan(adjusted), metadata

    plans = gather_object(mesh, on_all_ranks(mesh, doing, plan_own))
    agreed = on_all_ranks(mesh, doing, plan_all)
    own = scatter_object(mesh, agreed and agreed[0])
    written = on_all_ranks(mesh, doing, lambda: writer.write_data(planner.finish_plan(own), planner).wait())
    results = gather_object(mesh, written)

    def finish() -> None:
        if agreed and results:
            writer.finish(agreed[1], results)

    on_all_ranks(mesh, doing, finish)
    return _files_of(written)


def _files_of(written: list[WriteResult]) -> dict[str, int]:
    files: dict[str, int] = {}
    for place in (result.storage_data for result in written):
        files[place.relative_path] = max(files.get(place.relative_path, 0), place.offset + place.length)
    return files


def read(directory: Path, metadata: Metadata, state: State) -> None:
    """Fill a state in place. Each rank reads for itself, without collectives."""
    planner, reader = FragmentLoadPlanner(), FileSystemReader(directory)
    planner.set_up_planner(state, metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    refuse_packed_items(directory, (metadata.storage_data[item.storage_index] for item in plan.items))
    reader.read_data(planner.finish_plan(plan), planner).wait()
