"""Words with recipes by name and paths from the environment: command line before environment before recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_megatron.encoders.bert.data_module import BertDataModule
from lightning_megatron.encoders.t5.data_module import T5DataModule
from lightning_megatron.errors import ConfigError
from lightning_megatron.lightning.datamodules.datamodule import MegatronDataModule
from lightning_megatron.tools.cli.recipes.options import with_environment
from lightning_megatron.tools.cli.recipes.words import config_words
from lightning_megatron.tools.recipes.contents import contents_of
from lightning_megatron.tools.recipes.environment import DATA, OUTPUT, changes_of
from lightning_megatron.tools.recipes.names import recipe_files

DATA_PATH = "LIGHTNING_MEGATRON_DATA_PATH"


def test_a_name_becomes_its_files_where_it_stands() -> None:
    words = ["fit", "--recipe", "llama3.1-8b-32k", "--trainer.max_steps", "3"]
    base, more = map(str, recipe_files("llama3.1-8b-32k"))
    assert config_words(words, {}) == ["fit", "--config", base, "--config", more, "--trainer.max_steps", "3"]
    words = ["fit", "--recipe=llama3.1-8b", "--seed_everything=2", "--config=mine.yaml", "--data.seed", "1"]
    expected = ["fit", "--seed_everything=2", "--config", base, "--config", "mine.yaml", "--data.seed", "1"]
    assert config_words(words, {}) == expected


def test_words_without_a_recipe_stay_as_they_are() -> None:
    words = ["fit", "--model", "LlamaModule", "--help"]
    assert config_words(words, {DATA_PATH: "a"}) == words
    with pytest.raises(ConfigError, match="needs a recipe"):
        config_words(["fit", "--scale", "cpu"], {})
    with pytest.raises(ConfigError, match="no recipe of this name"):
        config_words(["fit", "--recipe", "nothing"], {})


def test_variables_come_behind_the_files_and_before_other_words() -> None:
    words = ["fit", "--recipe", "llama-tiny", "--data.data_path", "mine"]
    (file,) = map(str, recipe_files("llama-tiny"))
    found = config_words(words, {DATA_PATH: "theirs"})
    assert found[:3] == ["fit", "--config", file]
    changes = {"data": {"class_path": "MegatronDataModule", "init_args": {"data_path": "theirs"}}}
    assert found[3] == "--config"
    assert json.loads(found[4]) == changes
    assert found[5:] == ["--data.data_path", "mine"]
    assert config_words(words, {DATA_PATH: ""}) == ["fit", "--config", file, "--data.data_path", "mine"]


@pytest.mark.parametrize("module", [MegatronDataModule, BertDataModule, T5DataModule])
def test_each_data_module_takes_the_variables_that_it_has(module: Any) -> None:
    import inspect

    parameters = inspect.signature(module.__init__).parameters
    recipe = {"data": {"class_path": module.__name__, "init_args": {}}}
    found = changes_of(recipe, dict.fromkeys(DATA, "x"))["data"]["init_args"]
    assert set(found) == {argument for argument in DATA.values() if argument in parameters}
    assert changes_of({"data": {"class_path": "mine.Data"}}, dict.fromkeys(DATA, "x")) == {}


def test_a_blend_is_a_list() -> None:
    recipe = contents_of(recipe_files("llama-tiny"))
    found = changes_of(recipe, {DATA_PATH: "[0.3, a, 0.7, b]"})
    assert found["data"]["init_args"]["data_path"] == [0.3, "a", 0.7, "b"]


def test_empty_variables_count_as_missing() -> None:
    assert changes_of(contents_of(recipe_files("llama-tiny")), dict.fromkeys((*DATA, OUTPUT), "")) == {}


def test_another_output_folder_moves_what_lies_in_the_recipes_own(tmp_path: Path) -> None:
    callbacks = [
        {"class_path": "lightning_megatron.Throughput"},
        {"class_path": "ModelCheckpoint", "init_args": {"dirpath": "out/a/checkpoints", "save_last": "link"}},
        {"class_path": "ModelCheckpoint", "init_args": {"dirpath": "/elsewhere"}},
    ]
    (tmp_path / "mine.yaml").write_text(
        yaml.safe_dump({"trainer": {"default_root_dir": "out", "max_steps": 3, "callbacks": callbacks}})
    )
    trainer = with_environment([str(tmp_path / "mine.yaml")], {OUTPUT: "/fast"})["trainer"]
    assert trainer["default_root_dir"] == "/fast"
    folders = [each.get("init_args", {}).get("dirpath") for each in trainer["callbacks"]]
    assert folders == [None, "/fast/a/checkpoints", "/elsewhere"]
    assert trainer["callbacks"][1]["init_args"]["save_last"] == "link"
    assert trainer["max_steps"] == 3
