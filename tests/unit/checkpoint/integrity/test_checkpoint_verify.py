"""Any fault is found and named: hundreds of random ones in the files, and what only the metadata can tell."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import zlib
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import pytest
import torch

from lightning_megatron.checkpoint import (
    CheckpointError,
    SaveGuard,
    load,
    model_state,
    optimizer_state,
    save,
    verify,
)
from lightning_megatron.checkpoint.integrity import block_sums
from lightning_megatron.checkpoint.integrity.hashed_files import HashedStream
from lightning_megatron.checkpoint.integrity.manifest import FileRecord, Manifest, read_manifest, record
from lightning_megatron.checkpoint.integrity.replicas import digests, replica_faults
from lightning_megatron.checkpoint.select.verify import written_faults
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.params import ParamShard, ParamSpec

MESH = ParallelMesh.single()
SHAPES = {"up.weight": (4, 3), "up.bias": (4,), "norm": (5,)}
FAULTS = int(os.environ.get("LIGHTNING_MEGATRON_FUZZ", "300"))


def state_of(seed: int, leave_out: str | None = None, wrong: str | None = None):
    torch.manual_seed(seed)
    tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    shards = []
    for name, shape in SHAPES.items():
        size = tensors[name].numel()
        main, moments = torch.randn(size), {"exp_avg": torch.randn(size)}
        shards.append(ParamShard(name, ParamSpec(shape), shape, 0, size, main, moments, {"step": torch.tensor(3.0)}))
    state = model_state(tensors, {}, MESH)
    state |= optimizer_state(0, shards, MESH, [{"lr": 0.1, "params": list(SHAPES)}])
    if leave_out is not None:
        del state[leave_out]
    if wrong is not None:
        state[wrong] = model_state({"x": torch.zeros(7)}, {}, MESH)["model.x"]
    return state


def saved(path: Path, seed: int = 0, meta=None, **options) -> Path:
    save(path, state_of(seed, **options), meta or {"seed": seed}, MESH, allow_objects=True)
    return path


# Random faults


def flip(path: Path, other: Path, chance: random.Random) -> None:
    file = chance.choice(sorted(path.iterdir()))
    content = bytearray(file.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


def overwrite(path: Path, other: Path, chance: random.Random) -> None:
    file = chance.choice(sorted(path.iterdir()))
    content = bytearray(file.read_bytes())
    start, length = chance.randrange(len(content)), chance.randint(1, 64)
    content[start : start + length] = bytes(255 - byte for byte in content[start : start + length])
    file.write_bytes(content)


def truncate(path: Path, other: Path, chance: random.Random) -> None:
    file = chance.choice(sorted(path.iterdir()))
    os.truncate(file, chance.randrange(file.stat().st_size))


def append(path: Path, other: Path, chance: random.Random) -> None:
    with chance.choice(sorted(path.iterdir())).open("ab") as stream:
        stream.write(chance.randbytes(chance.randint(1, 9)))


def lose(path: Path, other: Path, chance: random.Random) -> None:
    chance.choice(sorted(path.iterdir())).unlink()


def swap(path: Path, other: Path, chance: random.Random) -> None:
    first, second = chance.sample(sorted(path.iterdir()), 2)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def take_from_another(path: Path, other: Path, chance: random.Random) -> None:
    # The other checkpoint is of the same model, so its files have the same lengths and are sound by themselves.
    name = chance.choice(["__0_0.distcp", "meta.pt"])
    shutil.copyfile(other / name, path / name)


def add(path: Path, other: Path, chance: random.Random) -> None:
    (path / f"__{chance.randint(1, 9)}_0.distcp").write_bytes(chance.randbytes(chance.randrange(99)))


def edit_manifest(path: Path, other: Path, chance: random.Random) -> None:
    file = path / "manifest.json"
    text = file.read_text()
    places = [place for place, letter in enumerate(text) if letter.isalnum()]
    place = chance.choice(places)
    letter = chance.choice([c for c in "0123456789abcdef" if c != text[place]])
    file.write_text(text[:place] + letter + text[place + 1 :])


KINDS: list[Callable[[Path, Path, random.Random], None]] = [
    flip, overwrite, truncate, append, lose, swap, take_from_another, add, edit_manifest,
]  # fmt: skip


def test_every_random_fault_is_found_and_none_is_loaded(tmp_path):
    whole, other = saved(tmp_path / "whole.ckpt"), saved(tmp_path / "other.ckpt", seed=1)
    names = {file.name for file in whole.iterdir()}
    chance = random.Random(20)
    for number in range(FAULTS):
        path = shutil.copytree(whole, tmp_path / "damaged.ckpt")
        kind = KINDS[number % len(KINDS)]
        kind(path, other, chance)
        faults = verify(path)
        assert faults, (number, kind.__name__)
        assert all(fault.file in names or kind is add for fault in faults), (number, faults)
        state = state_of(2)
        before = state_of(2)
        with pytest.raises(CheckpointError):
            load(path, state, MESH, check="hashes")
        assert all(
            torch.equal(a.chunks[0].data, b.chunks[0].data)
            for a, b in zip(state.values(), before.values(), strict=True)
            if hasattr(a, "chunks")
        ), "nothing was filled"
        shutil.rmtree(path)
    assert verify(whole) == []


# Which tensor


def test_the_tensor_at_fault_is_named(tmp_path):
    path = saved(tmp_path / "a.ckpt")
    file = path / "__0_0.distcp"
    content = file.read_bytes()
    bias = state_of(0)["model.up.bias"].chunks[0].data.numpy().tobytes()
    place = content.index(bias)
    file.write_bytes(content[:place] + b"\xff" + content[place + 1 :])
    (fault,) = verify(path)
    assert (fault.file, fault.tensors) == ("__0_0.distcp", ("model.up.bias",))
    assert str(fault) == "__0_0.distcp: altered: its hash is not the one that was written (model.up.bias)"
    os.truncate(file, place)
    (fault,) = verify(path)
    assert "model.up.bias" in fault.tensors
    file.unlink()
    (fault,) = verify(path)
    assert set(fault.tensors) > {f"model.{name}" for name in SHAPES}


# Files that are as they were written, and yet something is missing


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"leave_out": "optimizer_0.state.norm.exp_avg"}, ["state is missing", "optimizer_0.state.norm.exp_avg"]),
        ({"leave_out": "model.up.bias"}, ["of a parameter that is not there", "model.up.bias"]),
        ({"leave_out": "optimizer_0.param_groups"}, ["optimizer_0 has no param_groups"]),
        ({"wrong": "optimizer_0.state.norm.exp_avg"}, ["not of the parameter's shape (5,)", "norm.exp_avg"]),
        ({"meta": {"path": Path("x")}}, ["meta.pt: holds objects"]),
    ],
)
def test_what_is_missing_from_the_start_is_told(tmp_path, options, words):
    (fault,) = verify(saved(tmp_path / "a.ckpt", **options))
    for word in words:
        assert word in str(fault)


@pytest.mark.parametrize("length", [0, 1, (1 << 23) - 1, 1 << 23, (1 << 24) + (1 << 20) + 7])
def test_the_hash_of_a_file_is_that_of_the_check_sums_of_its_blocks(tmp_path, length, monkeypatch):
    monkeypatch.setattr(block_sums, "_READ_BYTES", 1 << 23)  # so that several threads have a part of it
    content = random.Random(length).randbytes(length)
    (tmp_path / "file").write_bytes(content)
    blocks = [content[start : start + (1 << 20)] for start in range(0, length, 1 << 20)]
    sums = b"".join(zlib.crc32(block).to_bytes(4, "big") for block in blocks)
    assert record(tmp_path / "file") == FileRecord(length, blake2b(sums, digest_size=32).hexdigest())


def rewritten(path: Path, change: Callable[[object], None]) -> Path:
    """With other metadata, and a manifest that agrees: a fault of the program that wrote it."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    known = read_manifest(path)
    files = {name: record(path / name) for name in known.files}
    (path / "manifest.json").write_text(Manifest(known.layout, files, known.torch).render())
    return path


def without_a_box(metadata) -> None:
    metadata.state_dict_metadata["model.up.weight"].chunks.clear()


def without_a_place(metadata) -> None:
    del metadata.storage_data[next(index for index in metadata.storage_data if index.fqn == "model.norm")]


def beyond_the_end(metadata) -> None:
    next(place for index, place in metadata.storage_data.items() if index.fqn == "model.norm").length += 1 << 20


def in_another_file(metadata) -> None:
    next(p for i, p in metadata.storage_data.items() if i.fqn == "model.norm").relative_path = "__9_0.distcp"


@pytest.mark.parametrize(
    ("change", "key", "words"),
    [
        (without_a_box, "model.up.weight", "12 of 12 elements are written by no rank"),
        (without_a_place, "model.norm", "no file is listed"),
        (beyond_the_end, "model.norm", "should reach to byte"),
        (in_another_file, "model.norm", "__9_0.distcp: named as holding tensors, but not in the manifest"),
    ],
)
def test_metadata_that_does_not_add_up_is_told(tmp_path, change, key, words):
    told = {str(fault) for fault in verify(rewritten(saved(tmp_path / "a.ckpt"), change))}
    assert any(words in text and key in text for text in told), told


# Before a checkpoint has its name


def test_a_guard_lets_good_files_pass_and_finds_what_differs_from_memory(tmp_path):
    path = saved(tmp_path / "a.ckpt")
    assert written_faults(path, MESH) == []
    file = path / "__0_0.distcp"
    content = file.read_bytes()
    place = content.index(state_of(0)["model.norm"].chunks[0].data.numpy().tobytes())
    assert content.count(content[place : place + 20]) == 1, "no other tensor has these bytes"
    file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    (fault,) = written_faults(path, MESH)
    assert (fault.file, fault.tensors) == ("__0_0.distcp", ("model.norm",))


def test_a_guarded_save_refuses_a_file_that_the_disk_has_changed_and_another_one_does_not_look(tmp_path, monkeypatch):
    """A bit flips between memory and disk, where its bytes are written; they are hashed as they should be."""
    norm = state_of(0)["model.norm"].chunks[0].data.numpy().tobytes()
    write, flipped = HashedStream._write, []

    def flips(stream: HashedStream, content: memoryview) -> None:
        if bytes(content) == norm:
            flipped.append(len(content))
            content = memoryview(bytes([norm[0] ^ 1]) + norm[1:])
        write(stream, content)

    monkeypatch.setattr(HashedStream, "_write", flips)
    with pytest.raises(CheckpointError, match=r"what was written is damaged:\n  - __0_0\.distcp: altered.*model\.norm"):
        save(tmp_path / "a.ckpt", state_of(0), {}, MESH, guard=SaveGuard())
    assert flipped == [len(norm)]
    assert list(tmp_path.iterdir()) == []
    save(tmp_path / "a.ckpt", state_of(0), {}, MESH)
    assert [fault.file for fault in verify(tmp_path / "a.ckpt")] == ["__0_0.distcp"]


def test_replicas_are_compared_box_by_box():
    one, two, three = state_of(0), state_of(0), state_of(0)
    assert replica_faults([digests(one), digests(two)]) == []
    three["model.norm"].chunks[0].data[2] = float("nan")
    del two["model.up.bias"]
    (fault,) = replica_faults([digests(two), digests(one), digests(three)])
    assert str(fault) == "in memory: ranks 2 hold other values than rank 0 (model.norm)"
    both_nan = state_of(0)
    both_nan["model.norm"].chunks[0].data[2] = float("nan")
    assert replica_faults([digests(three), digests(both_nan)]) == [], "compared by bits"
