"""Checkpoints that megatron-core itself has written: our model computes from them what Megatron computes."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

from lightning_megatron.checkpoint import verify
from lightning_megatron.lightning.modules.load_module import load_module
from lightning_megatron.lightning.pretrained.convert import megatron_to_checkpoint
from lightning_megatron.tools.cli.convert import convert_command

GOLDEN = Path(__file__).parent / "golden" / "megatron.zip"
KINDS = ("gpt", "llama", "mixtral")


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    with zipfile.ZipFile(GOLDEN) as archive:
        archive.extractall(folder)
    return folder


@pytest.mark.parametrize("form", ["torch_dist", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_megatrons_own(golden, tmp_path, kind, form):
    target = tmp_path / "a.ckpt"
    megatron_to_checkpoint(golden / kind / form, target, allow_pickle=True)
    assert verify(target) == []
    module = load_module(target)
    assert module.config.vocab_size == 21, "padding is stripped"
    expected = torch.load(golden / kind / "logits.pt", weights_only=True)
    with torch.no_grad():
        logits = module(expected["tokens"])
    right = expected["logits"][..., :21]
    assert right.std() > 0.5, "a wrong weight would show"
    torch.testing.assert_close(logits, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_both_formats_hold_the_same_bits(golden, tmp_path, kind):
    states = []
    for form in ("torch_dist", "torch"):
        megatron_to_checkpoint(golden / kind / form / "iter_0000010", tmp_path / form, allow_pickle=True)
        states.append(load_module(tmp_path / form).state_dict())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_pickles_are_refused_unless_asked_for(golden, tmp_path, capsys):
    source = str(golden / "llama" / "torch")
    assert convert_command(["megatron-to-ckpt", source, str(tmp_path / "a.ckpt")]) == 2
    assert "--allow-pickle" in capsys.readouterr().err
    assert convert_command(["megatron-to-ckpt", source, str(tmp_path / "a.ckpt"), "--allow-pickle"]) == 0
    assert load_module(tmp_path / "a.ckpt").config.num_layers == 4


def test_torch_dist_needs_no_pickle_where_the_model_is_named(golden, tmp_path, capsys):
    source = str(golden / "gpt" / "torch_dist")
    assert convert_command(["megatron-to-ckpt", source, str(tmp_path / "a.ckpt")]) == 2
    assert "--allow-pickle" in capsys.readouterr().err
    config = tmp_path / "config.json"
    config.write_text(
        '{"num_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "ffn_hidden_size": 12, "vocab_size": 21,'
        ' "max_position_embeddings": 8, "vocab_multiple": 4}'
    )
    assert convert_command(["megatron-to-ckpt", source, str(tmp_path / "a.ckpt"), "--config", str(config)]) == 0
    assert convert_command(["megatron-to-ckpt", source, str(tmp_path / "b.ckpt"), "--allow-pickle"]) == 0
    a, b = (load_module(tmp_path / name).state_dict() for name in ("a.ckpt", "b.ckpt"))
    assert all(torch.equal(a[name], b[name]) for name in b)
    wrong = ["megatron-to-ckpt", source, str(tmp_path / "c.ckpt"), "--config", "gpt2"]
    assert convert_command(wrong) == 2
    assert "num_layers=12: the checkpoint has 2; nearest valid: 2" in capsys.readouterr().err
