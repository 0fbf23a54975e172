"""Boxes of saved tensors go straight to the memory that they belong to, whatever the cut."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader

from lightning_megatron.checkpoint import CheckpointError, load, model_state, save
from lightning_megatron.checkpoint.dcp import box_reader
from lightning_megatron.checkpoint.tensors.fragment import Chunk, Fragment
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.params import Box

MESH = ParallelMesh.single()
SHAPES = [(), (7,), (6, 5), (3, 1, 4), (2, 3, 4, 5)]


def saved(path: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(1)
    flat = torch.randint(0, 100, (1000,), generator=chance).to(dtype)
    whole = {f"t{len(shape)}": flat[3 : 3 + torch.Size(shape).numel()].view(shape) for shape in SHAPES}
    save(path, model_state(whole, {}, MESH), {}, MESH)
    return whole


def wanted(whole: dict[str, Tensor], dtype: torch.dtype, dice: random.Random) -> dict[str, Fragment]:
    """A box of each tensor, some of them in memory with gaps."""
    state = {}
    for name, tensor in whole.items():
        offsets = tuple(dice.randrange(size) for size in tensor.shape)
        sizes = tuple(dice.randint(1, size - first) for size, first in zip(tensor.shape, offsets, strict=True))
        memory = torch.zeros(*sizes, 2, dtype=dtype)[..., 0] if dice.random() < 0.3 else torch.zeros(sizes, dtype=dtype)
        chunk = Chunk(Box(offsets, sizes), memory, write=False)
        state[f"model.{name}"] = Fragment(tuple(tensor.shape), dtype, (chunk,))
    return state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
@pytest.mark.parametrize("rows", [1 << 20, 16])
def test_every_box_has_its_values_and_torch_reads_none(
    dtype: torch.dtype, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[Any] = []
    monkeypatch.setattr(FileSystemReader, "read_data", lambda reader, plan, planner: left.extend(plan.items))
    monkeypatch.setattr(box_reader, "_SCRATCH_BYTES", rows)
    monkeypatch.setattr(box_reader, "_TASK_BYTES", 2 * rows)
    monkeypatch.setattr(box_reader.BoxReader, "read_data", waiting(box_reader.BoxReader.read_data))
    whole, dice = saved(tmp_path / "a.ckpt", dtype), random.Random(rows)
    for _ in range(20):
        state = wanted(whole, dtype, dice)
        load(tmp_path / "a.ckpt", dict(state), MESH)
        for key, fragment in state.items():
            (chunk,) = fragment.chunks
            expected = whole[key.removeprefix("model.")]
            for dim, (offset, size) in enumerate(zip(chunk.box.offsets, chunk.box.sizes, strict=True)):
                expected = expected.narrow(dim, offset, size)
            assert torch.equal(chunk.data, expected), key
    assert left == []


def waiting(read_data: Any) -> Any:
    """A reader whose base class reads nothing returns no future."""

    def read(reader: Any, plan: Any, planner: Any) -> Any:
        read_data(reader, plan, planner)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    return read


def test_another_dtype_is_converted(tmp_path: Path) -> None:
    whole = saved(tmp_path / "a.ckpt", torch.float32)
    halves = {name: torch.zeros_like(tensor, dtype=torch.bfloat16) for name, tensor in whole.items()}
    load(tmp_path / "a.ckpt", model_state(halves, {}, MESH), MESH)
    assert all(halves[name].equal(tensor.bfloat16()) for name, tensor in whole.items())


def test_a_load_is_a_write_for_autograd_and_for_watchers_of_versions(tmp_path: Path) -> None:
    whole = saved(tmp_path / "a.ckpt", torch.float32)
    blank = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    before = {name: tensor._version for name, tensor in blank.items()}
    load(tmp_path / "a.ckpt", model_state(blank, {}, MESH), MESH)
    assert all(tensor._version > before[name] for name, tensor in blank.items())


def test_a_file_that_ends_too_early_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = saved(tmp_path / "a.ckpt", torch.float32)
    monkeypatch.setattr(box_reader, "_read_into", short(box_reader._read_into))
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: truncated"):
        load(tmp_path / "a.ckpt", model_state(whole, {}, MESH), MESH)


def short(read_into: Any) -> Any:
    """As if the file were cut off after it was checked."""

    class Ended:
        def readinto(self, memory: Any) -> int:
            return 0

    return lambda stream, memory, file: read_into(Ended(), memory, file)


def test_a_single_number_with_any_stride_is_saved_and_loaded(tmp_path: Path) -> None:
    one = torch.arange(6.0).view(3, 2)[1:2, 1:]
    assert one.stride() != (1, 1)
    save(tmp_path / "a.ckpt", model_state({"one": one}, {}, MESH), {}, MESH)
    blank = torch.zeros(3, 2)
    load(tmp_path / "a.ckpt", model_state({"one": blank[1:2, 1:]}, {}, MESH), MESH)
    assert blank.tolist() == [[0.0, 0.0], [0.0, 3.0], [0.0, 0.0]]
