"""Recipes of the package: by name, listed, printed, and in what is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_megatron.errors import ConfigError
from lightning_megatron.models.presets import PRESETS
from lightning_megatron.tools.cli.main import main
from lightning_megatron.tools.cli.recipes.command import summary_of
from lightning_megatron.tools.recipes.contents import contents_of
from lightning_megatron.tools.recipes.names import files_of, is_file, recipe_files, recipe_names

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "lightning_megatron" / "tools" / "recipes"
ENCODERS = ROOT / "lightning_megatron" / "encoders"


def test_every_file_has_a_name_and_every_name_its_files() -> None:
    files = {path for name in recipe_names() for path in recipe_files(name)}
    assert files == {*FOLDER.rglob("*.yaml"), *ENCODERS.glob("*/recipes/*.yaml")}
    assert recipe_files("llama3.1-8b-32k-cp") == (FOLDER / "llama3.1-8b.yaml", FOLDER / "llama3.1-8b" / "32k-cp.yaml")
    for name in recipe_names():
        assert not is_file(name)
        assert files_of(name) == recipe_files(name)
        assert recipe_files(name)[0].read_text().startswith("# lightning-megatron fit --recipe ")


def test_the_published_models_are_there() -> None:
    sizes = ("1.7b", "3.6b", "7.5b", "18.4b", "39.1b", "76.1b", "145.6b", "310.1b")
    wanted = {*(f"gpt3-{size}" for size in sizes), "llama2-7b", "llama2-13b", "llama2-70b"}
    wanted |= {"llama3.1-8b", "llama3.1-70b", "mixtral-8x7b"}
    assert wanted <= set(recipe_names()) & {*PRESETS, "llama3.1-8b"}


@pytest.mark.parametrize("name", ["llama", "llama2-70", "nothing"])
def test_an_unknown_name_is_told_with_the_nearest(name: str) -> None:
    with pytest.raises(ConfigError, match="no recipe of this name") as error:
        recipe_files(name)
    assert error.value.problems[0].nearest[0] in recipe_names()
    if name == "llama2-70":
        assert error.value.problems[0].nearest[0] == "llama2-70b"


@pytest.mark.parametrize("words", [["plan", "--device", "cpu"], ["parity"], ["launch", "--launcher", "torchrun"]])
def test_commands_tell_it_too(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--recipe", "llama2-70"]) == 2
    assert "nearest valid: llama2-70b" in capsys.readouterr().err
    assert words[0] == "plan" or main(words) == 2  # `plan` without a recipe searches
    assert words[0] == "plan" or "--recipe NAME" in capsys.readouterr().err


def test_the_list_has_sizes_and_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["name", "parameters", "devices", "layout"]
    assert [row.split()[0] for row in rows] == recipe_names()
    (row,) = (row for row in rows if row.startswith("gpt3-310.1b"))
    assert row.split("  ")[0] == "gpt3-310.1b"
    assert "dp 15 x tp 8 x pp 16 x vpp 2" in row
    assert row.split()[1:3] == ["310.1B", "1920"]


def test_a_printed_recipe_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("llama2-70b", "llama3.1-8b-32k"):
        assert main(["recipes", name]) == 0
        assert yaml.safe_load(capsys.readouterr().out) == contents_of(recipe_files(name))
    assert main(["recipes", "llama2-70"]) == 2


def test_samples_of_a_step_are_those_of_the_data_module() -> None:
    assert summary_of("llama3.1-8b-32k").samples == 512
    assert summary_of("bloom-13b").samples == 1024


def test_recipes_are_in_what_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    words = ["egg_info", "--egg-base", tmp_path, "build", "--build-base", tmp_path, "--build-lib", tmp_path / "lib"]
    command = [sys.executable, "-c", "import setuptools; setuptools.setup()", "--quiet", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = {path.relative_to(tmp_path / "lib") for path in tmp_path.joinpath("lib").rglob("*.yaml")}
    assert found == {path.relative_to(ROOT) for name in recipe_names() for path in recipe_files(name)}
