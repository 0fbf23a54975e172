from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_megatron.checkpoint import Fragment, local_tensors, model_state, optimizer_state, regrouped
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.params import ParamShard, ParamSpec


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4, 2)
        self.norm = nn.BatchNorm1d(2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.zeros(9), persistent=False)


def test_a_tied_parameter_is_listed_once_and_only_persistent_buffers():
    assert list(local_tensors(Tied())) == [
        "embedding.weight",
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]


def meshes(**sizes):
    layout = ParallelLayout(**sizes)
    return [ParallelMesh(layout.resolve(layout.world_size), rank) for rank in range(layout.world_size)]


def writers_of(key, states):
    return [i for i, state in enumerate(states) if any(chunk.write for chunk in state[key].chunks)]


def test_each_replica_group_has_one_writer_and_the_work_is_spread():
    tensors = {f"w{i}": torch.zeros(4, 3) for i in range(8)} | {f"n{i}": torch.zeros(3) for i in range(8)}
    specs = {f"w{i}": ParamSpec((8, 3), 0) for i in range(8)} | {f"n{i}": ParamSpec((3,)) for i in range(8)}
    states = [model_state(tensors, specs, mesh) for mesh in meshes(tp=2, dp=2, cp=2)]
    for i in range(8):
        assert len(writers_of(f"model.w{i}", states)) == 2, "one for each slice"
        assert len(writers_of(f"model.n{i}", states)) == 1
    written = [sum(chunk.write for value in state.values() for chunk in value.chunks) for state in states]
    assert written == [3] * 8, "two slices and one whole tensor each"


def test_what_has_no_spec_is_saved_by_the_first_rank():
    tensors = {f"running_{i}": torch.zeros(3) for i in range(8)} | {"running_mean._extra_state": 1}
    states = [model_state(tensors, {}, mesh) for mesh in meshes(tp=2, dp=2, cp=2)]
    assert [writers_of(f"model.running_{i}", states) for i in range(8)] == [[0]] * 8
    copies = [model_state(tensors, {}, mesh, saving=True) for mesh in meshes(tp=2, dp=2, cp=2)][1:]
    assert all(list(state) == [f"model.running_{i}" for i in range(8)] for state in copies)
    assert not any(value.chunks for state in copies for value in state.values())


def test_a_copy_on_another_stage_reads_from_the_first_and_writes_nothing():
    spec = ParamSpec((4, 2), tied_with="embedding.weight")
    (mesh,) = meshes(dp=1)
    state = model_state({"head.weight": torch.zeros(4, 2)}, {"head.weight": spec}, mesh)
    (chunk,) = state["model.embedding.weight"].chunks
    assert not chunk.write


def test_fragments_are_views_of_live_memory():
    weight = nn.Parameter(torch.zeros(3, 2))
    fragment = model_state({"w": weight}, {}, ParallelMesh.single())["model.w"]
    fragment.chunks[0].data.fill_(4)
    assert isinstance(fragment, Fragment)
    assert weight.eq(4).all()


def test_a_tensor_that_does_not_fit_its_spec_is_named():
    with pytest.raises(ValueError, match=r"up\.weight: .*\(3, 2\).*\(5, 5\)"):
        model_state({"up.weight": torch.zeros(3, 2)}, {"up.weight": ParamSpec((5, 5), 0)}, ParallelMesh.single())
    shard = ParamShard("w", ParamSpec((4,)), (4,), 0, 4, torch.zeros(4), {"exp_avg": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"optimizer_0\.state\.w\.exp_avg has 1 elements for a range of 4"):
        optimizer_state(0, [shard], ParallelMesh.single(), [])


def test_shared_state_is_written_with_the_first_element_of_its_parameter():
    layout = ParallelLayout(dp=2).resolve(2)
    states = []
    for rank in range(2):
        span, step = (2 * rank, 2 * rank + 2), {"step": torch.tensor(3.0)}
        entry = ParamShard("w", ParamSpec((4,)), (4,), *span, torch.zeros(2), {}, step)
        states.append(optimizer_state(0, [entry], ParallelMesh(layout, rank), []))
    assert writers_of("optimizer_0.state.w.step", states) == [0]
    assert writers_of("optimizer_0.state.w.master", states) == [0, 1]


def test_groups_cut_the_same_way_get_all_scalars_back():
    saved = [{"lr": 0.1, "betas": (0.9, 0.95), "params": ["a", "b"]}, {"lr": 0.2, "betas": (0.8, 0.9), "params": ["c"]}]
    found, notes = regrouped(saved, [["a", "b"], ["c"]])
    assert found == [{"lr": 0.1, "betas": (0.9, 0.95)}, {"lr": 0.2, "betas": (0.8, 0.9)}]
    assert notes == []
    found, notes = regrouped(saved, [["c"], ["b"], ["a"]])
    assert [group["lr"] for group in found] == [0.2, 0.1, 0.1]
    assert notes == []


def test_groups_joined_keep_what_agrees_and_tell_what_does_not():
    saved = [
        {"lr": torch.tensor(0.5), "weight_decay": 0.1, "params": ["a"]},
        {"lr": torch.tensor(0.5), "weight_decay": 0.0, "params": ["b"]},
    ]
    found, notes = regrouped(saved, [["a", "b"], ["new"], []])
    assert found[0].keys() == {"lr"}
    assert found[1:] == [{}, {}]
    assert notes == [
        "group 0 joins groups whose weight_decay was 0.1, 0.0: the value of today stays",
        "group 1 (new, ...) is new: its settings stay",
    ]
