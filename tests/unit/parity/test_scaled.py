"""Recipes in small: the same axes, as few processes as asked for, and a job that can be planned."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.errors import ConfigError
from lightning_megatron.tools.cli.recipes.job import Given, read_recipe
from lightning_megatron.tools.cli.recipes.words import config_words
from lightning_megatron.tools.parity.scaled import MOST, at_most
from lightning_megatron.tools.recipes.environment import OUTPUT
from lightning_megatron.tools.recipes.names import recipe_files, recipe_names

ENCODERS = ("bert", "t5")
AXES = ("tp", "pp", "cp", "dp")


def scaled(name: str, folder: Path, scale: str = "cpu") -> Path:
    words = config_words(["fit", "--recipe", name, "--scale", scale], {OUTPUT: str(folder)})
    assert words[:2] == ["fit", "--config"]
    return Path(words[2])


@pytest.mark.parametrize(
    ("axes", "ranks", "most", "expected"),
    [
        ({"tp": 8, "pp": 16, "vpp": 2}, 256, 16, (4, 2, 1, 2)),
        ({"tp": 8, "pp": 16, "vpp": 2}, 256, 256, (8, 16, 1, 2)),
        ({"tp": 8}, 16, 16, (8, 1, 1, 2)),
        ({"tp": 8, "cp": 2}, 32, 8, (2, 1, 2, 2)),
        ({"tp": 3, "pp": 5}, 15, 6, (3, 2, 1, 1)),
        ({"tp": 2, "pp": 2}, 8, 1, (2, 2, 1, 2)),
    ],
)
def test_the_largest_axes_are_halved_and_none_vanishes(
    axes: dict[str, int], ranks: int, most: int, expected: tuple[int, ...]
) -> None:
    found = at_most(ParallelLayout(**axes).resolve(ranks), most)
    assert tuple(getattr(found, axis) for axis in AXES) == expected
    assert found.vpp == axes.get("vpp", 1)


def test_experts_are_spread_over_as_many_ranks_as_are_left() -> None:
    whole = ParallelLayout(tp=2, ep=8, etp=1).resolve(16)
    found = at_most(whole, 8)
    assert (found.tp, found.dp, found.ep, found.etp) == (2, 4, 8, 1)
    found = at_most(whole, 4)
    assert (found.tp, found.dp, found.ep, found.etp) == (2, 2, 4, 1)


@pytest.mark.parametrize("name", [name for name in recipe_names() if not name.startswith(ENCODERS)])
def test_every_recipe_has_a_small_one_with_its_axes(name: str, tmp_path: Path) -> None:
    file = scaled(name, tmp_path)
    whole, small = read_recipe(recipe_files(name), Given()), read_recipe([str(file)], Given())
    assert small.layout.world_size <= MOST
    for axis in (*AXES, "vpp", "ep"):
        assert (getattr(small.layout, axis) > 1) == (getattr(whole.layout, axis) > 1), axis
    recipe = yaml.safe_load(file.read_text())
    assert recipe["trainer"]["accelerator"] == "cpu"
    assert recipe["trainer"]["default_root_dir"] == str(tmp_path / f"{name}-on-cpu")
    assert "compile" not in recipe["trainer"]["strategy"]["init_args"]
    assert small.config.num_parameters() < 40e6
    assert small.recompute.granularity == whole.recompute.granularity
    kept = ("norm", "activation", "position_embedding", "tie_embeddings")
    assert [getattr(small.config, field) for field in kept] == [getattr(whole.config, field) for field in kept]


def test_what_is_there_stays_as_it_is(tmp_path: Path) -> None:
    file = scaled("llama-tiny", tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in file.parent.iterdir()}
    assert set(before) == {"recipe.yaml", "tokens.bin", "tokens.idx"}
    assert scaled("llama-tiny", tmp_path) == file
    assert {path.name: path.stat().st_mtime_ns for path in file.parent.iterdir()} == before


@pytest.mark.parametrize(
    ("name", "scale", "words"),
    [
        ("llama-tiny", "gpu", "must be cpu, or cpu=N"),
        ("llama-tiny", "cpu=0", "must be cpu, or cpu=N"),
        ("bert-large", "cpu", "nearest valid: --recipe bert-tiny"),
        ("t5-11b", "cpu", "nearest valid: --recipe t5-tiny"),
    ],
)
def test_what_cannot_be_made_small_is_told(name: str, scale: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        scaled(name, tmp_path, scale)
