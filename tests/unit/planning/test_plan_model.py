"""Shapes of models for a plan: presets, and configurations of Hugging Face, without torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_megatron.errors import ConfigError
from lightning_megatron.families import FAMILIES
from lightning_megatron.models.presets import preset
from lightning_megatron.tools.cli.recipes.model import model_of

LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}


def test_a_preset() -> None:
    assert model_of("llama3.1-70b") is preset("llama3.1-70b")


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_directory_and_its_config_are_the_same_as_for_an_import(is_folder: bool, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    found = model_of(str(tmp_path if is_folder else file))
    assert found == FAMILIES["llama"].config_of(LLAMA)
    assert found.num_parameters() == pytest.approx(70.6e9, rel=1e-3)


@pytest.mark.parametrize(
    ("contents", "wanted"),
    [
        ({**LLAMA, "model_type": "lama"}, "model_type='lama': no mapping for it; nearest valid: llama"),
        ({**LLAMA, "hidden_act": "relu", "num_hidden_layers": None}, "2 problems"),
        ("[]", "cannot be read: not a JSON object"),
        ("{", "cannot be read"),
    ],
)
def test_all_reasons_why_a_config_is_not_ours(contents: object, wanted: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(contents if isinstance(contents, str) else json.dumps(contents))
    with pytest.raises(ConfigError) as raised:
        model_of(str(file))
    assert wanted in str(raised.value)


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"nearest valid: llama3.1-70b"):
        model_of("lama3.1-70b")


def test_models_without_formulas_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"BertConfig.*no formulas"):
        model_of("bert-base")
    with pytest.raises(ConfigError, match=r"T5Config.*no formulas"):
        model_of("t5-base")
