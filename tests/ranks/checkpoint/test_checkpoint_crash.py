from __future__ import annotations

import os
import re
from dataclasses import replace

import pytest
import torch
from checkpoint_toy import Toy, mesh_of

from lightning_megatron.checkpoint import CheckpointError, Fragment, load, save, saving, verify
from lightning_megatron.checkpoint.dcp import fragments as transfer
from lightning_megatron.checkpoint.dcp.box_writer import BoxWriter
from lightning_megatron.testing.workers import WorkerError


def save_toy(path, number, fault=None):
    """Save; a fault strikes rank 1 (or 0, where only it acts) at the named moment."""
    toy = Toy(mesh_of(tp=2, dp=2), filled=True)
    state = toy.state()
    if fault == "unreadable tensor" and toy.mesh.rank == 1:
        fragments = ((key, value) for key, value in state.items() if isinstance(value, Fragment))
        key, value = next((key, value) for key, value in fragments if any(chunk.write for chunk in value.chunks))
        broken = [replace(chunk, data=chunk.data.to("meta")) for chunk in value.chunks]
        state[key] = Fragment(value.shape, value.dtype, tuple(broken))
    with pytest.MonkeyPatch.context() as patch:
        if fault == "killed while writing":
            patch.setattr(transfer, "BoxWriter", _Killed)
        if fault == "disk full":
            patch.setattr(transfer, "BoxWriter", _Full)
        if fault == "killed before publishing":
            patch.setattr(saving, "publish", lambda *_: os._exit(9))
        try:
            save(path, state, {"number": number}, toy.mesh)
        except CheckpointError as error:
            return str(error)
    return None


class _Killed(BoxWriter):
    def write_data(self, plan, planner):
        if torch.distributed.get_rank() == 1:
            (self.path / "__1_0.distcp").write_bytes(b"half")
            os._exit(9)
        return super().write_data(plan, planner)


class _Full(BoxWriter):
    def write_data(self, plan, planner):
        if torch.distributed.get_rank() == 1:
            raise OSError(28, "No space left on device")
        return super().write_data(plan, planner)


def load_toy(path):
    toy = Toy(mesh_of(dp=2), filled=False)
    loaded = load(path, toy.state(), toy.mesh, check="hashes")
    return toy.wrong(), loaded.meta["number"]


def test_an_error_on_one_rank_is_told_by_all_and_leaves_the_old_checkpoint(tmp_path, ranks):
    path = tmp_path / "last.ckpt"
    assert ranks(4, save_toy, path, 1) == [None] * 4
    for fault, words in (("unreadable tensor", "rank 1"), ("disk full", "rank 1: OSError: .*No space left")):
        texts = ranks(4, save_toy, path, 2, fault)
        assert len(set(texts)) == 1
        assert "saving" in texts[0]
        assert str(path) in texts[0]
        assert re.search(words, texts[0])
        assert verify(path) == []
        assert ranks(2, load_toy, path) == [([], 1)] * 2
        assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"], "nothing half-written is left"
    assert ranks(4, save_toy, path, 3) == [None] * 4
    assert ranks(2, load_toy, path) == [([], 3)] * 2
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("fault", ["killed while writing", "killed before publishing"])
def test_a_killed_rank_leaves_the_old_checkpoint(fault, tmp_path, ranks):
    path = tmp_path / "last.ckpt"
    ranks(4, save_toy, path, 1)
    with pytest.raises(WorkerError):
        ranks(4, save_toy, path, 2, fault)
    assert verify(path) == []
    assert ranks(2, load_toy, path) == [([], 1)] * 2
    assert [p.name for p in tmp_path.glob("*.ckpt")] == ["last.ckpt"]
    ranks(4, save_toy, path, 3)
    assert ranks(2, load_toy, path) == [([], 3)] * 2
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


def load_misfit(path):
    toy = Toy(mesh_of(pp=2, dp=1), filled=False)
    if toy.mesh.rank == 1:
        toy.params["layers.1.up.bias"] = torch.zeros(9)
        toy.specs["layers.1.up.bias"] = type(toy.specs["scale"])((9,))
    try:
        load(path, toy.state(), toy.mesh)
    except CheckpointError as error:
        return str(error)


def test_a_misfit_on_one_stage_is_told_by_all(tmp_path, ranks):
    path = tmp_path / "a.ckpt"
    ranks(4, save_toy, path, 1)
    first, second = ranks(2, load_misfit, path)
    assert first == second
    assert "rank 1" in first
    assert "model.layers.1.up.bias: shape (8,) in the checkpoint, (9,) in the model" in first
