"""Division of hashing over ranks, and the parts of a single file that its own check sums cover."""

from __future__ import annotations

import os
import random
import shutil
import zipfile

import pytest
import torch
from torch import nn

from lightning_megatron.checkpoint import CheckpointError, load, local_tensors, model_state, open_checkpoint, save
from lightning_megatron.checkpoint.integrity.block_sums import BLOCK
from lightning_megatron.checkpoint.select.hashes import faults_of, ranges_by_rank
from lightning_megatron.errors import MissingCheckpointError
from lightning_megatron.mesh import ParallelMesh
from tests.reads import reads_of

MESH = ParallelMesh.single()


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
def test_every_byte_is_read_by_one_rank_and_all_read_equally_much(ranks):
    chance = random.Random(ranks)
    lengths = {f"__{n}_0.distcp": chance.choice([0, 1, BLOCK, 5 * BLOCK + 7, 9 * BLOCK]) for n in range(12)}
    found = ranges_by_rank(lengths, ranks)
    ends = dict.fromkeys(lengths, 0)
    for name, start, end in (each for own in found for each in own):
        assert ends[name] == start, "in order, without gap or overlap"
        assert start % BLOCK == 0
        ends[name] = end
    assert ends == lengths
    blocks = [sum(-(-(end - start) // BLOCK) for _, start, end in own) for own in found]
    assert max(blocks) - min(blocks) <= 1
    first = [own[0][0] for own in found if own]
    assert first == sorted(first, key=lambda name: int(name[2:].partition("_")[0])), "10 comes after 9"


def test_ranks_read_what_they_wrote():
    lengths = {"meta.pt": 9, **{f"__{n}_0.distcp": 4 * BLOCK for n in range(12)}}
    for rank, own in enumerate(ranges_by_rank(lengths, 12)):
        read = {name: end - start for name, start, end in own}
        assert read[f"__{rank}_0.distcp"] >= 3 * BLOCK


def saved(folder):
    model = nn.Linear(3, 5)
    torch.save({"state_dict": model.state_dict(), "global_step": 3}, folder / "one.ckpt")
    return folder / "one.ckpt", model.weight.detach()


def loaded(path, check="hashes"):
    model = nn.Linear(3, 5)
    load(path, model_state(local_tensors(model), {}, MESH), MESH, check=check)
    return model.weight.detach()


def flip(path, content):
    whole = path.read_bytes()
    place = whole.index(content) + len(content) // 2
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])


def test_a_flipped_bit_in_a_single_file_is_refused(tmp_path):
    path, weight = saved(tmp_path)
    assert faults_of(path, MESH) == []
    flip(path, weight.numpy().tobytes())
    with pytest.raises(CheckpointError, match=r"one.ckpt: its record one/data/\d is damaged: the check sum is wrong"):
        loaded(path)
    assert not loaded(path, "sizes").equal(weight), "the way out"


def test_a_single_file_without_check_sums_is_taken_as_it_is(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        path, weight = saved(tmp_path)
    finally:
        torch.serialization.set_crc32_options(True)
    with zipfile.ZipFile(path) as archive:
        assert {record.CRC for record in archive.infolist()} == {0}
    assert loaded(path).equal(weight)


def test_what_every_rank_reads_whole_is_always_hashed(tmp_path):
    path = tmp_path / "a.ckpt"
    save(path, {}, {"epoch": 4, "note": "abcdefgh"}, MESH)
    flip(path / "meta.pt", b"abcdefgh")
    with pytest.raises(CheckpointError, match=r"meta\.pt: altered"):
        load(path, {}, MESH, check="sizes")


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_what_is_open_already_is_read_no_further_than_its_check_asks_for(kind, tmp_path):
    path, weight = saved(tmp_path)
    if kind == "directory":
        path = tmp_path / "many.ckpt"
        save(path, model_state({"weight": weight, "bias": torch.zeros(5)}, {}, MESH), {"global_step": 3}, MESH)
    opened = open_checkpoint(path, check="sizes")
    with reads_of(path) as reads:
        again = open_checkpoint(opened)
    assert not reads
    assert again.meta is opened.meta
    assert loaded(opened).equal(weight)
    file = path if kind == "file" else path / "__0_0.distcp"
    now = file.stat()
    flip(file, weight.numpy().tobytes())
    os.utime(file, ns=(now.st_atime_ns, now.st_mtime_ns))
    assert open_checkpoint(opened, check="sizes").meta is opened.meta
    with pytest.raises(CheckpointError, match=r"damaged"):
        open_checkpoint(opened)


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_another_checkpoint_in_the_place_of_an_open_one_is_opened(kind, tmp_path):
    def write(step):
        if kind == "file":
            torch.save({"state_dict": {"weight": torch.full((2,), step)}, "global_step": step}, tmp_path / "new")
            (tmp_path / "new").replace(path)
        else:
            save(path, model_state({"weight": torch.full((2,), step)}, {}, MESH), {"global_step": step}, MESH)

    path = tmp_path / "a.ckpt"
    write(3)
    opened = open_checkpoint(path, check="sizes")
    write(4)
    assert opened.meta["global_step"] == 3
    again = open_checkpoint(opened)
    assert again.meta["global_step"] == 4
    assert again.tensors()["model.weight"].materialize().tolist() == [4, 4]
    shutil.rmtree(path) if kind == "directory" else path.unlink()
    with pytest.raises(MissingCheckpointError):
        open_checkpoint(opened)
