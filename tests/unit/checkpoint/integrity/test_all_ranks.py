from __future__ import annotations

import io

import pytest
import torch

from lightning_megatron.comm.all_ranks import on_all_ranks
from lightning_megatron.errors import CheckpointError
from lightning_megatron.mesh import ParallelMesh


class Full(io.BytesIO):
    def write(self, content) -> int:
        if len(content) > 1000 or self.tell() > 1000:
            raise OSError(28, "No space left on device")
        return super().write(content)


def test_a_full_disk_is_told_in_the_words_of_the_system_and_not_of_torch():
    # Where the end of an archive finds no space either, torch trips over its own count of bytes.
    mesh = ParallelMesh.single(torch.device("cpu"))
    with pytest.raises(CheckpointError, match=r"^saving a.ckpt: OSError: \[Errno 28\] No space left on device$"):
        on_all_ranks(mesh, "saving a.ckpt", lambda: torch.save(torch.zeros(30000), Full()))
