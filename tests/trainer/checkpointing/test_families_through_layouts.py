"""Every family from a Hugging Face directory into a layout, through a checkpoint of it, and back: bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import MegatronModule, MegatronStrategy
from lightning_megatron.cli.main import main
from lightning_megatron.families import FAMILIES
from lightning_megatron.testing.trainer import quiet_trainer
from tests.families import (
    LAYOUTS,
    TINY,
    WITH_EXPERTS,
    hf_model,
    layouts_of,
    our_config,
    random_model,
    tokens_of,
    whole_weights,
)
from tests.foreign import to_foreign, weight_map

transformers = pytest.importorskip("transformers")
load_file = pytest.importorskip("safetensors.torch").load_file
save_file = pytest.importorskip("safetensors.torch").save_file

QUICK = ("tp2", "pp2", "cp2", "dp2 ep2", "tp2 ep2 etp1")


@cache
def reference(family: str) -> Any:
    return hf_model(TINY[family])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("families")
    for family in TINY:
        reference(family).save_pretrained(home / family)
    return home


def tensors_of(path: Path) -> dict[str, Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def steps_of_nothing(source: Path, layouts: dict[Path, dict[str, Any]]) -> None:
    """Load, train with a learning rate of 0, and save, in one layout after the other."""
    tokens = tokens_of(8, 17, seed=3)
    samples = [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]
    for target, layout in layouts.items():
        saver = ModelCheckpoint(target, save_last=True)
        strategy = MegatronStrategy(**{name: size for name, size in layout.items() if name != "dp"}, micro_batch_size=1)
        trainer = quiet_trainer(strategy, max_steps=2, callbacks=[saver], enable_checkpointing=True)
        module = MegatronModule.from_hf(source, lr=0.0, weight_decay=0.0, vocab_multiple=4)
        trainer.fit(module, DataLoader(samples, batch_size=4 // layout.get("dp", 1)))  # type: ignore[arg-type]


def size_of(layout: dict[str, Any]) -> int:
    """Ranks of a layout."""
    return prod(layout.get(axis, 1) for axis in ("tp", "pp", "cp", "dp"))


OFTEN = ("gpt2", "bloom", "gemma2", "gpt_oss", "deepseek_v3")
"""Families whose tensors are fused, split or named unlike the others'."""


def how_often(family: str) -> Any:
    if family == "qwen3_moe":
        return ()
    return pytest.mark.slow if family in OFTEN else pytest.mark.exhaustive


def check(ranks: Callable[..., list[Any]], folder: Path, home: Path, family: str, names: Sequence[str]) -> None:
    expected = tensors_of(folder / family)
    layouts = {home / name.replace(" ", "-"): (LAYOUTS | WITH_EXPERTS)[name] for name in names}
    for size in sorted(set(map(size_of, layouts.values()))):
        ranks(
            size, steps_of_nothing, folder / family, {p: kind for p, kind in layouts.items() if size_of(kind) == size}
        )
    for saved in layouts:
        back = saved / "back"
        assert main(["convert", "ckpt-to-hf", str(saved / "last.ckpt"), str(back)]) == 0
        found = tensors_of(back)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected), saved.name
    assert json.loads((back / "config.json").read_text())["model_type"] == family
    loaded = transformers.AutoModelForCausalLM.from_pretrained(back, attn_implementation="eager")
    with torch.no_grad():
        assert torch.equal(loaded(tokens_of(2, 9)).logits, reference(family)(tokens_of(2, 9)).logits)


@pytest.mark.parametrize("family", [pytest.param(each, marks=how_often(each)) for each in TINY])
def test_files_through_a_layout_are_bit_equal(
    ranks: Callable[..., list[Any]], folder: Path, tmp_path: Path, family: str
) -> None:
    check(ranks, folder, tmp_path, family, [name for name in layouts_of(family) if name in QUICK])


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", TINY)
def test_files_through_all_other_layouts_are_bit_equal(
    ranks: Callable[..., list[Any]], folder: Path, tmp_path: Path, family: str
) -> None:
    check(ranks, folder, tmp_path, family, [name for name in layouts_of(family) if name not in QUICK])


@pytest.mark.slow
def test_modules_for_further_tokens_come_along(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    """transformers does not save them: the files are a random model's of ours."""
    contents = TINY["deepseek_v3"] | {"num_nextn_predict_layers": 1}
    model = random_model(our_config(contents))
    expected = to_foreign(weight_map(FAMILIES["deepseek_v3"], model.config), whole_weights(model))
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(contents))
    save_file({name: value.clone() for name, value in expected.items()}, source / "model.safetensors")
    for number, layout in enumerate([{"pp": 2}, {"tp": 2, "ep": 2, "etp": 1}]):
        saved, back = tmp_path / f"{number}", tmp_path / f"back{number}"
        ranks(2, steps_of_nothing, source, {saved: layout})
        assert main(["convert", "ckpt-to-hf", str(saved / "last.ckpt"), str(back)]) == 0
        found = tensors_of(back)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected), layout
    assert json.loads((back / "config.json").read_text())["num_nextn_predict_layers"] == 1
