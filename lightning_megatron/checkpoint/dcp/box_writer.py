"""Boxes of tensors, written from the memory that holds them.

torch's own writer copies views of larger storages, and computes checksums, writes and waits for the disk in turn.
"""

from __future__ import annotations

import io
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lightning_megatron.checkpoint.formats.tensor_archive import ArchiveWriter
from lightning_megatron.checkpoint.integrity.hashed_files import HashedStream
from lightning_megatron.checkpoint.integrity.manifest import FileRecord

_THREADS = 2  # one hashes, one waits for the disk


class BoxWriter(FileSystemWriter):
    """A writer of torch.distributed.checkpoint's files that hashes them on the way.

    Args:
        path: directory to write into.
        single_file: True for one file per rank; else one for each item, so that only one item is in memory.

    Attributes:
        records: length and hash of each file that has been written, by name.
    """

    def __init__(self, path: Path, single_file: bool) -> None:
        super().__init__(path, single_file_per_rank=single_file, sync_files=True)
        self.records: dict[str, FileRecord] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the items of a plan; their files are on the disk when this returns."""
        items = sorted(plan.items, key=lambda item: item.type is not WriteItemType.BYTE_IO)
        results: list[WriteResult] = []
        with ThreadPoolExecutor(_THREADS, "checkpoint files") as threads:
            for number, group in enumerate([items] if self.single_file_per_rank else [[item] for item in items]):
                results += self._write_file(f"{plan.storage_data.prefix}{number}.distcp", group, planner, threads)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write_file(
        self, name: str, items: list[WriteItem], planner: SavePlanner, threads: ThreadPoolExecutor
    ) -> list[WriteResult]:
        results = []
        with HashedStream(Path(self.path) / name, threads) as stream:
            archives = ArchiveWriter(stream)
            for item in items:
                start, content = stream.tell(), planner.resolve_data(item)
                if isinstance(content, io.BytesIO):
                    stream.write(content.getbuffer())
                else:
                    archives.write(_with_own_storage(content))
                length = stream.tell() - start
                results.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
            os.fsync(stream.fileno())
        self.records[name] = stream.record()
        return results


def _with_own_storage(data: Tensor) -> Tensor:
    """The tensor, contiguous in host memory, without the rest of a larger storage; a view if possible."""
    data = data.detach().cpu().contiguous()
    if data.numel() == 1:  # unlike any other contiguous tensor, it may have arbitrary strides
        return data.reshape(()).clone().view(data.shape)
    if data.untyped_storage().nbytes() == data.nbytes:
        return data
    content = torch.from_numpy(data.view(-1).view(torch.uint8).numpy())
    return content.view(data.dtype).view(data.shape)
