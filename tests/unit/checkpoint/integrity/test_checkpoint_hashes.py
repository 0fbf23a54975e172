"""Division of hashing over ranks, and the parts of a single file that its own check sums cover."""

from __future__ import annotations

import random
import zipfile

import pytest
import torch
from torch import nn

from lightning_megatron.checkpoint import CheckpointError, load, local_tensors, model_state, save
from lightning_megatron.checkpoint.integrity.block_sums import BLOCK
from lightning_megatron.checkpoint.select.hashes import faults_of, ranges_by_rank
from lightning_megatron.mesh import ParallelMesh

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
