"""Lightning's single files: what is taken from them, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_megatron.checkpoint import CheckpointError, load, model_state, optimizer_state
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.params import ParamShard, ParamSpec

MESH = ParallelMesh.single()
SHAPES = {"embed": (5, 2), "bias": (2,)}


def file_of(folder, order=("embed", "bias"), rows=8, fill=0.0):
    """Embedding with padding rows, a bias, and an Adam that lists them in some order."""
    params = {"embed": torch.full((rows, 2), fill), "bias": torch.tensor([1.0, 2.0])}
    params["embed"][:5] = torch.arange(10.0).view(5, 2)
    optimizer = torch.optim.Adam([nn.Parameter(params[name]) for name in order], lr=0.5)
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = param.detach().clone()
    tensors = {name: tensor.clone() for name, tensor in params.items()}
    optimizer.step()
    path = folder / "one.ckpt"
    states = [optimizer.state_dict()]
    torch.save({"state_dict": tensors, "optimizer_states": states, "global_step": 3}, path)
    return path, tensors, states[0]["state"]


def blank(shapes=SHAPES):
    """A model and its Adam, all zero; and the memory of the moments, flat."""
    params = {name: torch.zeros(shape) for name, shape in shapes.items()}
    specs = {name: ParamSpec(shape) for name, shape in shapes.items()}
    moments = {name: torch.zeros(param.numel()) for name, param in params.items()}
    step = torch.tensor(0.0)
    shards = [
        ParamShard(
            name, specs[name], shapes[name], 0, p.numel(), p.view(-1), {"exp_avg": moments[name]}, {"step": step}
        )
        for name, p in params.items()
    ]
    groups = [{"lr": 0.0, "params": list(params)}]
    return model_state(params, specs, MESH) | optimizer_state(0, shards, MESH, groups), params, moments, step


def test_weights_moments_and_settings_come_out_of_a_file_without_padding(tmp_path):
    path, tensors, saved = file_of(tmp_path)
    state, params, moments, step = blank()
    loaded = load(path, state, MESH, strict=False)  # it asks for one of the two moments alone
    assert params["embed"].equal(tensors["embed"][:5])
    assert params["bias"].equal(tensors["bias"])
    assert moments["embed"].view(5, 2).equal(saved[0]["exp_avg"][:5])
    assert moments["bias"].equal(saved[1]["exp_avg"])
    assert step == 1.0
    assert state["optimizer_0.param_groups"][0]["lr"] == 0.5
    assert loaded.meta["global_step"] == 3
    assert loaded.per_rank is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fill": 1.0}, r"model.embed: shape \(8, 2\) in the checkpoint, \(5, 2\) in the model"),
        ({"order": ("bias", "embed")}, "groups list parameters in another order: embed"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, options, words):
    path, *_ = file_of(tmp_path, **options)
    with pytest.raises(CheckpointError, match=words):
        load(path, blank()[0], MESH)


def test_what_is_missing_is_named(tmp_path):
    path, *_ = file_of(tmp_path)
    state, *_ = blank(SHAPES | {"norm": (2,)})
    with pytest.raises(CheckpointError, match=r"model\.norm: not in the checkpoint"):
        load(path, state, MESH)
    torch.save({"state_dict": {"embed": torch.zeros(5, 2), "bias": torch.zeros(2)}}, path)
    with pytest.raises(CheckpointError, match=r"optimizer_0: the checkpoint has none of it.*save_weights_only"):
        load(path, blank()[0], MESH)


@pytest.mark.parametrize("content", [b"text", b""])
def test_another_file_is_refused(tmp_path, content):
    (tmp_path / "a.ckpt").write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(tmp_path / "a.ckpt", {}, MESH)
    torch.save({"weights": 1}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="no state_dict"):
        load(tmp_path / "a.ckpt", {}, MESH)
