"""Optimizer state in one file: the same bytes from every layout and level, bit-equal in every layout, little memory."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from checkpoint_toy import GROUPS, Toy, mesh_of, specs_of_whole, whole
from test_checkpoint_layouts import LAYOUTS, toy_of, world

from lightning_megatron.checkpoint import Fragment, State
from lightning_megatron.checkpoint.optimizer_export.export import Collectors, export_state, import_state
from lightning_megatron.checkpoint.optimizer_export.memory_levels import MEMORY_LEVELS, collecting_steps
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.errors import ConfigError

LEVELS = tuple(MEMORY_LEVELS)
SOME = ("one", "dp4", "tp2pp2", "tp2dp2unsharded", "tp2dp2ep2", "cp2ep4")


def state_of(toy: Toy) -> tuple[State, set[str]]:
    """Without the model; names in groups in one order."""
    state = {key: value for key, value in toy.state().items() if not key.startswith("model.")}
    key = "optimizer_0.param_groups"
    state[key] = [{**group, "params": sorted(set(group["params"]) - {"head.weight"})} for group in state[key]]
    experts = {key for key in state if ".experts." in key}
    return state, experts


def export(path: Path, layout: str, level: str, nodes: int = 1, width: int = 6) -> int:
    toy = toy_of(layout, filled=True, width=width)
    return export_state(path, *state_of(toy), Collectors(toy.mesh, level, toy.mesh.world.size // nodes)).peak


def load(path: Path, layout: str, level: str, nodes: int = 1) -> tuple[list[str], object]:
    toy = toy_of(layout, filled=False)
    for name in toy.specs:
        toy.params[name].copy_(toy._right(name, "param"))  # the file holds no model
    state, experts = state_of(toy)
    import_state(path, state, experts, Collectors(toy.mesh, level, toy.mesh.world.size // nodes))
    return toy.wrong(), state["optimizer_0.param_groups"]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.slow
def test_every_layout_and_level_writes_the_same_bytes_and_reads_them_back(tmp_path, ranks):
    ranks(1, export, tmp_path / "one", "one", LEVELS[0])
    expected = digest(tmp_path / "one")
    for layout in SOME:
        for level in LEVELS:
            nodes = 2 if world(layout) > 1 else 1
            ranks(world(layout), export, tmp_path / "x", layout, level, nodes)
            assert digest(tmp_path / "x") == expected, (layout, level)
            for wrong, groups in ranks(world(layout), load, tmp_path / "one", layout, level, nodes):
                assert wrong == [], (layout, level)
                assert [{k: v for k, v in g.items() if k != "params"} for g in groups] == GROUPS
    assert not list(tmp_path.glob(".*")), "nothing unfinished is left"


def test_the_file_is_safetensors_with_whole_tensors(tmp_path, ranks):
    from safetensors.torch import load_file

    ranks(4, export, tmp_path / "a.safetensors", "tp2dp2ep2", LEVELS[3])
    found = load_file(tmp_path / "a.safetensors")
    for name, spec in specs_of_whole(6).items():
        for kind, key in (("main", "master"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
            assert torch.equal(found[f"optimizer_0.state.{name}.{key}"], whole(name, spec, kind))
        assert found[f"optimizer_0.state.{name}.step"] == 7.0


@pytest.mark.parametrize("layout", [pytest.param("tp2pp2dp2", marks=pytest.mark.slow), "tp2dp2ep2"])
def test_memory_falls_from_level_to_level(tmp_path, ranks, layout, monkeypatch, record_property):
    monkeypatch.setitem(LAYOUTS, "tp2pp2dp2", {"tp": 2, "pp": 2, "dp": 2})
    width, nodes = 512, 2
    peaks = {}
    for level in LEVELS:
        options = {"layout_sizes": LAYOUTS[layout], "level": level, "nodes": nodes, "width": width}
        peaks[level] = ranks(world(layout), export_sizes, tmp_path / "x", options)
    record_property("peaks", peaks)
    print(layout, {level: [round(p / 1024) for p in found] for level, found in peaks.items()}, "KiB")
    total = sum(3 * 4 * torch.Size(spec.global_shape).numel() for spec in specs_of_whole(width).values())
    first = [peaks[level][0] for level in LEVELS]
    assert total <= first[0] <= 1.01 * total, "all of it"
    assert first[0] > first[1] > first[2] >= first[3]
    assert sum(peaks[LEVELS[1]]) == first[0], "together still all at once"
    assert sum(peaks[LEVELS[2]]) < sum(peaks[LEVELS[1]])


def export_sizes(path: Path, options: dict[str, object]) -> int:
    mesh = mesh_of(**options["layout_sizes"])  # type: ignore[arg-type]
    toy = Toy(mesh, filled=True, width=options["width"])  # type: ignore[arg-type]
    through = Collectors(mesh, options["level"], mesh.world.size // options["nodes"])  # type: ignore[arg-type, operator]
    return export_state(path, *state_of(toy), through).peak


def test_levels_deal_groups_to_nodes_as_they_say():
    layout = ParallelLayout(tp=2, dp=4).resolve(8)
    first, second = [(0, 2, 4, 6), (1, 3, 5, 7)]

    def dense(level: str) -> list[list[tuple[tuple[int, ...], int]]]:
        steps = collecting_steps(layout, 4, level)
        found = [[(g.ranks, g.collector) for g in step if not g.of_experts] for step in steps]
        return [step for step in found if step]

    assert dense("parallel_node_0") == [[(first, 0), (second, 0)]]
    assert dense("parallel_multi_node") == [[(first, 0), (second, 4)]]
    assert dense("serial_per_node") == [[(first, 0), (second, 4)]]
    assert dense("serial_per_dp_groups") == [[(first, 0)], [(second, 4)]]
    with pytest.raises(ConfigError, match="serial_per_node"):
        collecting_steps(layout, 4, "serial_per_nodes")


def fails(path: Path) -> None:
    toy = toy_of("dp4", filled=False)
    state, experts = state_of(toy)
    state["optimizer_0.state.other.master"] = next(value for value in state.values() if isinstance(value, Fragment))
    import_state(path, state, experts, Collectors(toy.mesh, LEVELS[0], 4))


def test_what_does_not_fit_is_refused_and_a_failed_export_leaves_the_old_file(tmp_path, ranks):
    ranks(1, export, tmp_path / "x", "one", LEVELS[0])
    with pytest.raises(AssertionError, match=r"optimizer_0\.state\.other\.master: not in the file"):
        ranks(4, fails, tmp_path / "x")
    before = digest(tmp_path / "x")
    (tmp_path / ".x.saving").mkdir()  # nobody can write there
    with pytest.raises(AssertionError, match="exporting"):
        ranks(4, export, tmp_path / "x", "dp4", LEVELS[1], 2)
    assert digest(tmp_path / "x") == before
    (tmp_path / "y").write_bytes((tmp_path / "x").read_bytes()[:-100])
    with pytest.raises(AssertionError, match="truncated"):
        ranks(4, load, tmp_path / "y", "dp4", LEVELS[1], 2)
