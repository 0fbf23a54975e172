"""T5's Hugging Face directories: in, through a layout, and out again, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from lightning_megatron import ConfigError, GPTModule, MegatronModule, MegatronStrategy, T5Module
from lightning_megatron.lightning.pretrained.convert import checkpoint_to_hf, hf_to_checkpoint
from lightning_megatron.testing.trainer import Recorder, quiet_trainer
from tests.t5 import TINY, hf_model, inputs_of, our_config

transformers = pytest.importorskip("transformers")


def assert_same_files(one: Path, other: Path) -> None:
    expected, found = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def write(folder: Path, kind: str) -> Any:
    model = hf_model(TINY[kind])
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", TINY)
def test_a_directory_becomes_a_checkpoint_and_the_same_directory(tmp_path: Path, kind: str) -> None:
    model, inputs = write(tmp_path / "hf", kind), inputs_of(2, 9, 6, padded=True)
    hf_to_checkpoint(tmp_path / "hf", tmp_path / "ckpt")
    checkpoint_to_hf(tmp_path / "ckpt", tmp_path / "back")
    assert_same_files(tmp_path / "hf", tmp_path / "back")
    again = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "back", attn_implementation="eager")
    given = {"input_ids": inputs.tokens, "attention_mask": inputs.padding_mask}
    given |= {"decoder_input_ids": inputs.decoder_tokens}
    with torch.no_grad():
        expected = model(**given).logits
        assert torch.equal(again.eval()(**given).logits, expected)
        module = T5Module.from_hf(tmp_path / "hf").eval()
        torch.testing.assert_close(module(*inputs), expected, rtol=1e-5, atol=1e-5)
        loaded = T5Module.load_from_checkpoint(tmp_path / "ckpt").eval()
        assert torch.equal(loaded(*inputs), module(*inputs))


def test_the_class_follows_from_the_directory(tmp_path: Path) -> None:
    write(tmp_path / "hf", "1.0")
    assert type(MegatronModule.from_hf(tmp_path / "hf")) is T5Module
    with pytest.raises(ConfigError, match="T5Config"):
        GPTModule.from_hf(tmp_path / "hf")
    with pytest.raises(ConfigError, match="takes"):
        T5Module("gpt2")


def rows(count: int) -> list[dict[str, Any]]:
    inputs = inputs_of(count, 9, 6, padded=True, seed=8)
    names = ("tokens", "decoder_tokens", "padding_mask")
    return [dict(zip(names, row, strict=True)) | {"labels": row[1]} for row in zip(*inputs, strict=True)]


def losses(steps: int, before: Path | None, after: Path | None, layout: dict[str, Any]) -> list[float]:
    """Losses of a run that begins with a checkpoint, and ends with one."""
    seed_everything(4, verbose=False)
    recorder = Recorder()
    trainer = quiet_trainer(MegatronStrategy(micro_batch_size=2, **layout), max_steps=steps, logger=recorder)
    loader = DataLoader(rows(4), batch_size=4)  # type: ignore[arg-type] # an epoch is a step
    trainer.fit(T5Module(our_config(TINY["1.1"], init_std=0.3), lr=1e-2, eps=1e-5), loader, ckpt_path=before)
    if after is not None:
        trainer.save_checkpoint(after)
    return recorder.series("train_loss")


@pytest.mark.slow
def test_a_run_goes_on_in_another_layout_with_its_optimizer(ranks: Any, tmp_path: Path) -> None:
    (expected,) = ranks(1, losses, 5, None, None, {})
    cut = {"pp": 2, "pipeline_layout": "Et|ttttL", "distributed_optimizer": True}  # both stages have encoder layers
    first = ranks(2, losses, 3, None, tmp_path / "3.ckpt", cut)
    rest = ranks(2, losses, 5, tmp_path / "3.ckpt", None, {"tp": 2})
    for before, after in zip(first, rest, strict=True):
        assert before + after == pytest.approx(expected, rel=1e-5)


def loss_in_two_trainers(layout: dict[str, Any]) -> tuple[float, float]:
    """Loss after training with a pipeline, there and in another layout of the same ranks."""
    seed_everything(4, verbose=False)
    module, loader = T5Module(our_config(TINY["1.0"]), lr=1e-2), DataLoader(rows(8), batch_size=4)  # type: ignore[arg-type]
    trainer = quiet_trainer(MegatronStrategy(pp=2, micro_batch_size=2), max_steps=2)
    trainer.fit(module, loader)
    (there,) = trainer.test(module, loader, verbose=False)
    (here,) = quiet_trainer(MegatronStrategy(**layout)).test(module, loader, verbose=False)
    return there["test_loss"], here["test_loss"]


@pytest.mark.slow
def test_weights_are_carried_over_to_another_trainer(ranks: Any) -> None:
    for there, here in ranks(2, loss_in_two_trainers, {"tp": 2}):
        assert here == pytest.approx(there, rel=1e-5)
