"""Ranks share the hashing of a checkpoint, and all hear of every fault."""

from __future__ import annotations

import pytest
import torch
from checkpoint_toy import mesh_of

from lightning_megatron.checkpoint import CheckpointError, faults_of, load, model_state, open_checkpoint, save
from lightning_megatron.checkpoint.integrity.block_sums import BLOCK
from lightning_megatron.mesh import ParallelMesh

SIZE = 3 * BLOCK  # bytes of the tensor


def state():
    return model_state({"weight": torch.arange(SIZE // 4, dtype=torch.float32)}, {}, ParallelMesh.single())


def told(path):
    mesh = mesh_of(dp=3)
    faults = [str(fault) for fault in faults_of(path, mesh)]
    with pytest.raises(CheckpointError) as error:
        load(path, state(), mesh)
    return faults, str(error.value)


def unreadable(path):
    """As if the file system of one node did not show the checkpoint."""
    mesh = mesh_of(dp=3)
    if mesh.rank == 2:
        path = path.parent / "elsewhere.ckpt"
    with pytest.raises(CheckpointError) as error:
        faults_of(path, mesh)
    return str(error.value)


def test_the_rank_that_read_a_damaged_stretch_is_named_on_all(ranks, tmp_path):
    path = tmp_path / "a.ckpt"
    save(path, state(), {}, ParallelMesh.single())
    for place in (100, SIZE - 100):
        content = bytearray((path / "__0_0.distcp").read_bytes())
        content[place] ^= 1
        (path / "__0_0.distcp").write_bytes(content)
    (name,) = {text for faults, _ in ranks(3, told, path) for text in faults}
    assert name == "__0_0.distcp: altered: its hash is not the one that was written (read by rank 0, 1, 2)"
    (error,) = {text for _, text in ranks(3, told, path)}
    assert error == f"loading {path}: the checkpoint is damaged:\n  - {name}"


def test_a_rank_that_cannot_read_is_named(ranks, tmp_path):
    path = tmp_path / "a.ckpt"
    save(path, state(), {}, ParallelMesh.single())
    for error in ranks(3, unreadable, path):
        assert "rank 2: it does not exist" in error
        assert "rank 0" not in error


def told_of_open(path, other):
    """Rank 0 has opened the first checkpoint alone, each rank the second one, before they load them together."""
    mesh = mesh_of(dp=2)
    opened = open_checkpoint(path, check="sizes") if mesh.rank == 0 else path
    weight = state()
    load(opened, weight, mesh)
    content = weight["model.weight"].chunks[0].data.tolist()[-1]
    opened = open_checkpoint(other, check="sizes")
    with pytest.raises(CheckpointError) as error:
        load(opened, state(), mesh)
    return content, str(error.value)


def test_ranks_that_have_opened_a_checkpoint_alone_still_compare_all_of_it_together(ranks, tmp_path):
    path, other = tmp_path / "a.ckpt", tmp_path / "b.ckpt"
    for each in (path, other):
        save(each, state(), {}, ParallelMesh.single())
    content = bytearray((other / "__0_0.distcp").read_bytes())
    content[SIZE - 100] ^= 1
    (other / "__0_0.distcp").write_bytes(content)
    for last, error in ranks(2, told_of_open, path, other):
        assert last == SIZE // 4 - 1
        assert "__0_0.distcp: altered: its hash is not the one that was written (read by rank 0, 1)" in error
