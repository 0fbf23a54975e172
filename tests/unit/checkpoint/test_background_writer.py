from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_megatron.checkpoint import BackgroundWriter, Fragment, PendingSave, local_tensors, model_state
from lightning_megatron.checkpoint.background import host_copy
from lightning_megatron.checkpoint.background.host_copy import HostCopy
from lightning_megatron.checkpoint.tensors.fragment import Chunk
from lightning_megatron.errors import CheckpointError
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.params import Box


def chunks_of(state):
    return {key: value.chunks[0].data for key, value in state.items() if isinstance(value, Fragment)}


def test_a_copy_keeps_its_values_and_the_next_one_its_memory():
    model = nn.Linear(3, 4)
    groups = {"groups": [{"lr": 0.5}]}
    state = model_state(local_tensors(model), {}, ParallelMesh.single()) | groups
    before = {key: data.clone() for key, data in chunks_of(state).items()}
    host = HostCopy()
    first = host.begin(state).finish()
    with torch.no_grad():
        model.weight += 1
    groups["groups"][0]["lr"] = 0.25
    assert all(data.equal(before[key]) for key, data in chunks_of(first).items())
    assert first["groups"] == [{"lr": 0.5}]
    addresses = {key: data.data_ptr() for key, data in chunks_of(first).items()}
    second = host.begin(state).finish()
    assert {key: data.data_ptr() for key, data in chunks_of(second).items()} == addresses
    assert chunks_of(second)["model.weight"].equal(model.weight)


def test_a_part_has_memory_of_its_own_so_that_nobody_needs_to_copy_it_again():
    flat = torch.arange(12.0)
    state = model_state({"a": flat[:5], "b": flat[5:]}, {}, ParallelMesh.single())
    for data in chunks_of(HostCopy().begin(state).finish()).values():
        assert data.untyped_storage().nbytes() == data.nbytes


def test_what_another_rank_saves_is_copied_only_if_wished():
    (key, whole), *_ = model_state({"a": torch.ones(2)}, {}, ParallelMesh.single()).items()
    chunk = replace(whole.chunks[0], data=torch.ones(2), write=False)
    state = {key: Fragment(whole.shape, whole.dtype, (chunk,))}
    assert HostCopy().begin(state).finish()[key].chunks == ()
    assert len(HostCopy().begin(state, replicas=True).finish()[key].chunks) == 1


def test_memory_under_two_names_is_copied_once():
    flat = torch.arange(12.0)
    state = model_state({"a": flat[:6].view(2, 3), "b": flat[:6].view(2, 3), "c": flat[:6]}, {}, ParallelMesh.single())
    found = chunks_of(HostCopy().begin(state).finish())
    assert found["model.a"].data_ptr() == found["model.b"].data_ptr() != found["model.c"].data_ptr()
    assert all(found[f"model.{name}"].flatten().equal(flat[:6]) for name in "abc")


def test_what_may_be_copied_late_is_live_until_it_is_and_the_caller_waits():
    tensors = {"early": torch.zeros(3), "late": torch.zeros(3), "half": torch.zeros(3, dtype=torch.bfloat16)}
    begun = HostCopy().begin(model_state(tensors, {}, ParallelMesh.single()), late={"model.late", "model.half"})
    tensors["early"] += 1
    waits = threading.Thread(target=begun.wait)
    waits.start()
    waits.join(0.05)
    assert waits.is_alive(), "nothing is copied yet"
    found = chunks_of(begun.finish())
    waits.join()
    for tensor in tensors.values():
        tensor += 1
    assert all(not data.any() for data in found.values())


def test_what_is_written_before_it_was_copied_is_told_and_not_saved():
    late = {f"s{i}": torch.zeros(3) for i in range(5)}
    begun = HostCopy().begin(model_state(late, {}, ParallelMesh.single()), late={f"model.{name}" for name in late})
    for tensor in late.values():
        tensor.zero_()
    with pytest.raises(CheckpointError, match=r"s\d and 2 more was written after the save.*finish_copy\(\)"):
        begun.finish()
    begun.wait()


def test_a_write_into_any_chunk_of_a_tensor_is_told():
    """The chunks of one tensor may be views of several: each has a version of its own."""
    parts = [torch.zeros(2), torch.zeros(3)]
    places = [Box((0,), (2,)), Box((2,), (3,))]
    chunks = tuple(Chunk(place, part, write=True) for place, part in zip(places, parts, strict=True))
    state = {"model.a": Fragment((5,), torch.float32, chunks)}
    for part in parts:
        begun = HostCopy().begin(state, late={"model.a"})
        part += 1
        with pytest.raises(CheckpointError, match=r"model\.a was written after the save"):
            begun.finish()


def test_a_copy_that_fails_lets_the_step_go_on_and_the_save_fails(tmp_path, monkeypatch):
    def full(source, memory):
        raise MemoryError

    monkeypatch.setattr(host_copy.devices, "copy_alone", full)
    mesh = ParallelMesh.single()
    pending = PendingSave.of(tmp_path / "a.ckpt", model_state({"x": torch.ones(3)}, {}, mesh), {}, mesh)
    writer = BackgroundWriter(mesh)
    writer.begin(replace(pending, late=frozenset({"model.x"})))()
    with pytest.raises(CheckpointError, match=r"a\.ckpt: MemoryError"):
        writer.close()
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_there_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(PendingSave, "write", lambda pending, mesh: None)
    mesh = ParallelMesh.single()
    writer = BackgroundWriter(mesh)
    writer.begin(PendingSave.of(tmp_path / "new" / "a.ckpt", {}, {}, mesh))
    writer.close()
    assert (tmp_path / "new").is_dir()
