from __future__ import annotations

import pickle
from math import prod

import pytest
import torch
from checkpoint_toy import GROUPS, STATES, Toy, mesh_of, specs_of_whole, whole

from lightning_megatron.checkpoint import load, model_state, save, shared_state, verify
from lightning_megatron.params import ParamSpec

LAYOUTS = {
    "one": {"dp": 1},
    "tp2": {"tp": 2, "dp": 1},
    "tp4": {"tp": 4, "dp": 1},
    "dp2": {"dp": 2},
    "dp4": {"dp": 4},
    "tp2dp2": {"tp": 2, "dp": 2},
    "pp2": {"pp": 2, "dp": 1},
    "cp2dp2": {"cp": 2, "dp": 2},
    "tp2pp2": {"tp": 2, "pp": 2, "dp": 1},
    "tp2dp2unsharded": {"tp": 2, "dp": 2, "unsharded": True},
    "ep2": {"dp": 2, "ep": 2},
    "tp2ep2": {"tp": 2, "dp": 1, "ep": 2, "etp": 1},
    "tp2dp2ep2": {"tp": 2, "dp": 2, "ep": 2},
    "tp2dp2ep2etp1unsharded": {"tp": 2, "dp": 2, "ep": 2, "etp": 1, "unsharded": True},
    "cp2ep4": {"cp": 2, "dp": 2, "ep": 4},
}
OFTEN = ("dp2", "tp2pp2", "tp2ep2")
"""Layouts that the fast tests load into; from all the others."""
GRID = ("tp", "cp", "dp", "pp")
SHOWN = ("tp2dp2", "dp4", "tp2pp2", "tp2dp2unsharded", "tp2dp2ep2", "tp2dp2ep2etp1unsharded")


def world(layout):
    return prod(size for axis, size in LAYOUTS[layout].items() if axis in GRID)


def toy_of(layout, **options):
    sizes = {k: v for k, v in LAYOUTS[layout].items() if k != "unsharded"}
    return Toy(mesh_of(**sizes), sharded="unsharded" not in LAYOUTS[layout], **options)


def save_toy(path, layout, width=6):
    toy = toy_of(layout, filled=True, width=width)
    own = {"rng": torch.tensor([toy.mesh.rank]), "python": (3, (1, 2), None)}
    save(path, toy.state(), {"epoch": 4, "layout": layout}, toy.mesh, per_rank=own)


def load_toy(path, layout, check="sizes"):
    toy = toy_of(layout, filled=False)
    state = toy.state()
    loaded = load(path, state, toy.mesh, check=check)
    groups = state["optimizer_0.param_groups"]
    shared = shared_state(state, 0).get("layers.0.up.weight", {})
    return toy.wrong(), loaded.meta, loaded.per_rank, groups, shared


@pytest.fixture(scope="module")
def saved(_pool, tmp_path_factory):
    """One checkpoint a layout."""
    folder = tmp_path_factory.mktemp("saved")
    for layout in LAYOUTS:
        _pool.run(world(layout), save_toy, folder / f"{layout}.ckpt", layout)
    return folder


def load_all(folder, after):
    return {before: load_toy(folder / f"{before}.ckpt", after) for before in LAYOUTS}


@pytest.mark.parametrize(
    "after", [pytest.param(after, marks=pytest.mark.gate if after in OFTEN else pytest.mark.slow) for after in LAYOUTS]
)
def test_any_layout_loads_into_any_other_bit_equal(after, saved, ranks):
    for found in ranks(world(after), load_all, saved, after):
        for before, (wrong, meta, own, groups, shared) in found.items():
            assert wrong == [], before
            assert meta == {"epoch": 4, "layout": before}
            assert [{k: v for k, v in g.items() if k != "params"} for g in groups] == GROUPS
            names = {name for group in groups for name in group["params"]}
            assert names - {"head.weight"} == set(specs_of_whole(6))
            assert shared in ({"step": 7.0, "count": 3}, {}), "a rank may hold nothing of that parameter"
            same = LAYOUTS[before].items() - {("unsharded", True)} == LAYOUTS[after].items() - {("unsharded", True)}
            assert (own is not None) == same


def test_what_a_rank_saved_for_itself_comes_back_to_its_coordinate(saved, ranks):
    results = ranks(4, load_toy, saved / "tp2dp2.ckpt", "tp2dp2", "hashes")
    assert [own["rng"].item() for _, _, own, *_ in results] == [0, 1, 2, 3]
    assert results[0][2]["python"] == (3, (1, 2), None)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_checkpoint_verifies(layout, saved):
    assert verify(saved / f"{layout}.ckpt") == []


@pytest.mark.parametrize("layout", SHOWN)
def test_every_element_is_written_once_and_the_files_are_little_longer(layout, tmp_path, ranks):
    width, path = 4096, tmp_path / "a.ckpt"
    ranks(world(layout), save_toy, path, layout, width)
    with (path / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    elements = sum(prod(spec.global_shape) for spec in specs_of_whole(width).values())
    of_model = [v for k, v in metadata.state_dict_metadata.items() if k.startswith("model.")]
    assert sum(prod(chunk.sizes) for entry in of_model for chunk in entry.chunks) == elements
    assert not any("head" in key for key in metadata.state_dict_metadata)
    tensors = 2 * elements + 4 * len(STATES) * elements
    sizes = [file.stat().st_size for file in sorted(path.glob("*.distcp"))]
    items = sum(len(getattr(entry, "chunks", [0])) for entry in metadata.state_dict_metadata.values())
    assert tensors < sum(sizes) < tensors + 2000 * items, "each box is a small file of torch.save"
    assert max(sizes) < 1.5 * sum(sizes) / len(sizes), "the work is spread"


def save_model_only(path):
    toy = toy_of("dp4", filled=True, width=4096)
    save(path, model_state(toy.params, toy.specs, toy.mesh), {}, toy.mesh)


def test_replicas_of_a_model_share_the_writing(tmp_path, ranks):
    ranks(4, save_model_only, tmp_path / "a.ckpt")
    sizes = [file.stat().st_size for file in (tmp_path / "a.ckpt").glob("*.distcp")]
    best = 2 * (2 * 8 * 4096)  # one embedding and four matrices for four ranks: one of them must take two matrices
    assert len(sizes) == 4
    assert max(sizes) < 4 / 3 * best


def save_and_load_plain_module_on_two_stages(path):
    mesh = mesh_of(pp=2, dp=1)
    plain = torch.full((3, 2), 5.0)
    save(path, model_state({"probe.weight": plain, f"layers.{mesh.pp.rank}.w": plain + 1}, {}, mesh), {}, mesh)
    back = torch.zeros(3, 2)
    load(path, model_state({"probe.weight": back}, {}, mesh), mesh, strict=False)
    return back.eq(5).all().item()


def test_a_module_under_one_name_on_all_stages_is_written_once(tmp_path, ranks):
    assert ranks(2, save_and_load_plain_module_on_two_stages, tmp_path / "a.ckpt") == [True, True]


def load_into_float(path):
    mesh = mesh_of(tp=2, dp=1)
    spec = specs_of_whole(6)["embedding.weight"]
    local = torch.zeros(7, 6)
    load(path, model_state({"embedding.weight": local}, {"embedding.weight": spec}, mesh), mesh, strict=False)
    right = whole("embedding.weight", spec, "param").bfloat16().float()
    return torch.equal(local[:6], right[7:]) if mesh.rank else torch.equal(local, right[:7])


def test_another_dtype_is_converted(saved, ranks):
    assert ranks(2, load_into_float, saved / "tp4.ckpt") == [True, True]


def save_with_holes(path, kind):
    mesh = mesh_of(tp=2, dp=1)
    x = torch.zeros(2, 2, dtype=torch.float64 if kind == "dtype" and mesh.rank else torch.float32)
    shape = {"hole": (6, 2), "beyond": (2, 2), "dtype": (4, 2), "shape": (4 + mesh.rank, 2)}[kind]
    save(path, model_state({"w": x}, {"w": ParamSpec(shape, 0)}, mesh), {}, mesh)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("hole", "model.w of shape .6, 2.: 4 of 12 elements are written by no rank"),
        ("dtype", "ranks disagree about model.w: .*float32.*float64"),
        ("shape", "ranks disagree about model.w: .*4, 2.*5, 2"),
    ],
)
def test_a_state_that_is_no_whole_model_is_never_published(kind, words, tmp_path, ranks):
    with pytest.raises(AssertionError, match=f"(?s)CheckpointError.*{words}"):
        ranks(2, save_with_holes, tmp_path / "a.ckpt", kind)
    assert not (tmp_path / "a.ckpt").exists()
