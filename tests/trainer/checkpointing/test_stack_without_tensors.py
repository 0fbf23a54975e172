"""A Hugging Face directory that counts modules of multi-token prediction and has none of their tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_megatron import MegatronModule
from lightning_megatron.checkpoint import CheckpointError
from lightning_megatron.errors import ConfigError
from lightning_megatron.families import FAMILIES
from lightning_megatron.lightning.pretrained.hugging_face import open_hf
from lightning_megatron.tools.cli.main import main
from tests.families import TINY, our_config, random_model, whole_weights
from tests.foreign import to_foreign, weight_map

save_file = pytest.importorskip("safetensors.torch").save_file

KEY = "num_nextn_predict_layers"


def directory(path: Path, saved: int, told: int) -> Path:
    """A directory with the tensors of ``saved`` modules, and a ``config.json`` that counts ``told``."""
    model = random_model(our_config(TINY["deepseek_v3"] | {KEY: saved}))
    tensors = to_foreign(weight_map(FAMILIES["deepseek_v3"], model.config), whole_weights(model))
    path.mkdir()
    save_file({name: value.clone() for name, value in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(TINY["deepseek_v3"] | {KEY: told}))
    return path


@pytest.mark.parametrize("told", [1, 2])
def test_the_key_is_named(told: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As transformers saves every DeepSeek-V3: by the module, by the reader, by the command that converts."""
    source = directory(tmp_path / "hf", 0, told)
    with pytest.raises(CheckpointError, match=f"{KEY}={told}: config.json says so, and no file has their tensors"):
        MegatronModule.from_hf(source).configure_model()
    with pytest.raises(ConfigError, match=f"{KEY}={told}: .*; nearest valid: 0"):
        open_hf(source)
    assert main(["convert", "hf-to-ckpt", str(source), str(tmp_path / "out")]) != 0
    assert f"{KEY}={told}: " in capsys.readouterr().err


@pytest.mark.parametrize(("saved", "told"), [(0, 0), (1, 1)])
def test_what_is_there_is_read(saved: int, told: int, tmp_path: Path) -> None:
    config, tensors = open_hf(directory(tmp_path / "hf", saved, told))
    assert config.mtp_num_layers == told
    assert any(name.startswith("mtp.") for name in tensors) == bool(told)


def test_tensors_that_are_missing_from_a_module_are_named_still(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.layers\.5\."):
        open_hf(directory(tmp_path / "hf", 1, 2))
