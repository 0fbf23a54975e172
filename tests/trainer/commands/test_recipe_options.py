"""``fit --recipe``: what the parser makes of the recipe, the environment and the words, in this order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from lightning_megatron.tools.cli.main import main

Read = Callable[..., dict[str, Any]]


@pytest.fixture
def read(capsys: pytest.CaptureFixture[str]) -> Read:
    def parsed(*words: str) -> dict[str, Any]:
        assert main(["fit", "--recipe", "llama-tiny", *words, "--print_config"]) == 0
        return dict(yaml.safe_load(capsys.readouterr().out))

    return parsed


def data_path(recipe: dict[str, Any]) -> Any:
    return recipe["data"]["init_args"]["data_path"]


def test_the_command_line_goes_before_the_environment_and_that_before_the_recipe(
    read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert data_path(read()) == ".demo/corpus_text_document"
    monkeypatch.setenv("LIGHTNING_MEGATRON_DATA_PATH", "theirs")
    found = read()
    assert data_path(found) == "theirs"
    assert found["data"]["init_args"]["seq_length"] == 128, "the recipe's other arguments stay"
    for words in (["--data.data_path", "mine"], ["--data.init_args.data_path=mine"]):
        assert data_path(read(*words)) == "mine"
    monkeypatch.setenv("LIGHTNING_MEGATRON_DATA_PATH", "[0.3, a, 0.7, b]")
    assert data_path(read()) == [0.3, "a", 0.7, "b"]


def test_outputs_go_to_another_folder(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    def folders(recipe: dict[str, Any]) -> tuple[Any, Any]:
        trainer = recipe["trainer"]
        return trainer["default_root_dir"], trainer["callbacks"][-1]["init_args"]["dirpath"]

    assert folders(read()) == ("out", "out/llama-tiny/checkpoints")
    monkeypatch.setenv("LIGHTNING_MEGATRON_OUTPUT_DIR", "/fast")
    assert folders(read()) == ("/fast", "/fast/llama-tiny/checkpoints")
    found = read("--trainer.default_root_dir", "mine", "--trainer.callbacks.dirpath", "here")
    assert folders(found) == ("mine", "here")


def test_files_change_a_recipe_by_name(read: Read, tmp_path: Any) -> None:
    (tmp_path / "more.yaml").write_text("trainer: {max_steps: 7}")
    found = read("--config", str(tmp_path / "more.yaml"))
    assert found["trainer"]["max_steps"] == 7
    assert found["trainer"]["log_every_n_steps"] == 5
