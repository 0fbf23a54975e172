from __future__ import annotations

import torch
from torch import nn

from lightning_megatron.checkpoint import BackgroundWriter, Fragment, PendingSave, local_tensors, model_state
from lightning_megatron.checkpoint.async_save import HostCopy
from lightning_megatron.mesh import ParallelMesh


def parts_of(state):
    return {key: value.parts[0].data for key, value in state.items() if isinstance(value, Fragment)}


def test_a_copy_keeps_its_values_and_the_next_one_its_memory():
    model = nn.Linear(3, 4)
    groups = {"groups": [{"lr": 0.5}]}
    state = model_state(local_tensors(model), {}, ParallelMesh.single()) | groups
    before = {key: data.clone() for key, data in parts_of(state).items()}
    host = HostCopy()
    first = host.of(state)
    with torch.no_grad():
        model.weight += 1
    groups["groups"][0]["lr"] = 0.25
    assert all(data.equal(before[key]) for key, data in parts_of(first).items())
    assert first["groups"] == [{"lr": 0.5}]
    addresses = {key: data.data_ptr() for key, data in parts_of(first).items()}
    second = host.of(state)
    assert {key: data.data_ptr() for key, data in parts_of(second).items()} == addresses
    assert parts_of(second)["model.weight"].equal(model.weight)


def test_a_part_has_memory_of_its_own_so_that_nobody_needs_to_copy_it_again():
    flat = torch.arange(12.0)
    state = model_state({"a": flat[:5], "b": flat[5:]}, {}, ParallelMesh.single())
    for data in parts_of(HostCopy().of(state)).values():
        assert data.untyped_storage().nbytes() == data.nbytes


def test_what_another_rank_saves_is_copied_only_if_wished():
    (key, whole), *_ = model_state({"a": torch.ones(2)}, {}, ParallelMesh.single()).items()
    state = {key: Fragment(whole.shape, whole.dtype, (type(whole.parts[0])(whole.parts[0].box, torch.ones(2), False),))}
    assert HostCopy().of(state)[key].parts == ()
    assert len(HostCopy().of(state, replicas=True)[key].parts) == 1


def test_the_folder_is_there_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(PendingSave, "write", lambda pending, mesh: None)
    mesh = ParallelMesh.single()
    writer = BackgroundWriter(mesh)
    writer.begin(PendingSave.of(tmp_path / "new" / "a.ckpt", {}, {}, mesh))
    writer.close()
    assert (tmp_path / "new").is_dir()
