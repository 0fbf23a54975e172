"""Every family from a Hugging Face directory into a layout, through a checkpoint of it, and back: bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import MegatronModule, MegatronStrategy
from lightning_megatron.families import FAMILIES
from lightning_megatron.testing.trainer import quiet_trainer
from lightning_megatron.tools.cli.main import main
from tests import t5
from tests.families import (
    LAYOUTS,
    POSITIONS,
    TINY,
    VOCABULARY,
    WITH_EXPERTS,
    hf_model,
    layouts_of,
    our_config,
    random_model,
    size_of,
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


def next_tokens() -> list[dict[str, Tensor]]:
    return [{"tokens": row[:-1], "labels": row[1:]} for row in tokens_of(8, 17, seed=3)]


def masked_tokens() -> list[dict[str, Tensor]]:
    return [{"tokens": row, "labels": row, "is_random": torch.tensor(1)} for row in tokens_of(8, 16, seed=3)]


def two_sequences() -> list[dict[str, Tensor]]:
    parts = [tokens_of(8, length, seed=3) for length in (10, 6)]
    return [{"tokens": read, "decoder_tokens": wrote, "labels": wrote} for read, wrote in zip(*parts, strict=True)]


def steps_of_nothing(
    source: Path, layouts: dict[Path, dict[str, Any]], samples: list[dict[str, Tensor]] | None = None
) -> None:
    """Load, train with a learning rate of 0, and save, in one layout after the other."""
    samples = samples or next_tokens()
    for target, layout in layouts.items():
        saver = ModelCheckpoint(target, save_last=True)
        strategy = MegatronStrategy(**{name: size for name, size in layout.items() if name != "dp"}, micro_batch_size=1)
        trainer = quiet_trainer(strategy, max_steps=2, callbacks=[saver], enable_checkpointing=True)
        module = MegatronModule.from_hf(source, lr=0.0, weight_decay=0.0, vocab_multiple=4)
        trainer.fit(module, DataLoader(samples, batch_size=4 // layout.get("dp", 1)))  # type: ignore[arg-type]


OFTEN = ("gpt2", "bloom", "gemma2", "gpt_oss", "deepseek_v3")
"""Families whose tensors are fused, split or named unlike the others'."""


def how_often(family: str) -> Any:
    if family == "qwen3_moe":
        return ()
    return pytest.mark.slow if family in OFTEN else pytest.mark.exhaustive


def check(ranks: Callable[..., list[Any]], source: Path, home: Path, layouts: dict[str, Any], *samples: Any) -> Path:
    """A directory goes through layouts, in one call for those of a size, and comes back; the last one's folder."""
    expected = tensors_of(source)
    for size in sorted(set(map(size_of, layouts.values()))):
        some = {home / name.replace(" ", "-"): kind for name, kind in layouts.items() if size_of(kind) == size}
        ranks(size, steps_of_nothing, source, some, *samples)
        for saved in some:
            back = saved / "back"
            assert main(["convert", "ckpt-to-hf", str(saved / "last.ckpt"), str(back)]) == 0
            found = tensors_of(back)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected), saved.name
    return back


def check_family(ranks: Callable[..., list[Any]], source: Path, home: Path, names: Sequence[str]) -> None:
    back, model = check(ranks, source, home, {name: (LAYOUTS | WITH_EXPERTS)[name] for name in names}), source.name
    assert json.loads((back / "config.json").read_text())["model_type"] == model
    assert torch.equal(logits_of(back), logits_of(source))


@torch.no_grad()
def logits_of(path: Path) -> Tensor:
    """Logits of a directory, by transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    for each in model.parameters():  # a product depends on the place of a weight in its file, from which it is mapped
        each.data = each.data.clone()
    logits: Tensor = model(tokens_of(2, 9)).logits
    return logits


@pytest.mark.parametrize("family", [pytest.param(each, marks=how_often(each)) for each in TINY])
def test_files_through_a_layout_are_bit_equal(
    ranks: Callable[..., list[Any]], folder: Path, tmp_path: Path, family: str
) -> None:
    check_family(ranks, folder / family, tmp_path, [name for name in layouts_of(family) if name in QUICK])


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", TINY)
def test_files_through_all_other_layouts_are_bit_equal(
    ranks: Callable[..., list[Any]], folder: Path, tmp_path: Path, family: str
) -> None:
    check_family(ranks, folder / family, tmp_path, [name for name in layouts_of(family) if name not in QUICK])


BERT: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48}
BERT |= {"vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS}
BERT |= {"attention_probs_dropout_prob": 0.0}  # a ring cannot drop weights
STACKS: dict[str, dict[str, Any]] = {
    "pp3": {"pp": 3},
    "pp2, gpipe": {"pp": 2, "pipeline_schedule": "gpipe"},
    "pp2, one encoder layer": {"pp": 2, "pipeline_layout": "Et|tttttttttttL"},
    "pp2 dp2 without ZeRO": {"pp": 2, "dp": 2, "distributed_optimizer": False},
    "pp2, recompute selective": {"pp": 2, "recompute": "selective"},
    "pp4, zero-bubble": {"pp": 4, "pipeline_schedule": "zero-bubble"},
}
"""Further layouts of T5, which takes no context parallelism."""
ENCODERS = {"bert": ["tp2", "pp2", "dp2"], "t5 1.0": ["tp2"], "t5 1.1": ["pp2"]}
"""Layouts of the gate by model; all others are for ``test-all``."""


def encoder(name: str, home: Path) -> tuple[dict[str, dict[str, Any]], list[dict[str, Tensor]]]:
    """Write a directory; its layouts and samples."""
    if name == "bert":
        torch.manual_seed(1)
        model = transformers.BertForPreTraining(transformers.BertConfig(**BERT))
        layouts, samples = LAYOUTS, masked_tokens()
    else:
        stacks = {"num_layers": 6} if name == "t5 1.0" else {"num_layers": 8, "num_decoder_layers": 4}
        model = t5.hf_model(t5.TINY[name.removeprefix("t5 ")] | stacks)
        layouts = {each: layout for each, layout in LAYOUTS.items() if "cp" not in layout} | STACKS
        samples = two_sequences()
    for each, param in model.named_parameters():
        torch.nn.init.normal_(param, mean=float("norm" in each), std=0.15)
    model.save_pretrained(home)
    return layouts, samples


@pytest.mark.slow
@pytest.mark.parametrize("name", ENCODERS)
def test_files_of_an_encoder_through_a_layout_are_bit_equal(
    ranks: Callable[..., list[Any]], tmp_path: Path, name: str
) -> None:
    layouts, samples = encoder(name, tmp_path / "hf")
    check(ranks, tmp_path / "hf", tmp_path, {each: layouts[each] for each in ENCODERS[name]}, samples)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ENCODERS)
def test_files_of_an_encoder_through_all_other_layouts_are_bit_equal(
    ranks: Callable[..., list[Any]], tmp_path: Path, name: str
) -> None:
    layouts, samples = encoder(name, tmp_path / "hf")
    assert len(layouts) >= 25
    others = {each: layout for each, layout in layouts.items() if each not in ENCODERS[name]}
    check(ranks, tmp_path / "hf", tmp_path, others, samples)


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
