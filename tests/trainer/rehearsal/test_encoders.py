"""Models with encoders, rehearsed: parameters, messages and FLOPs of a rank are those of the model by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_megatron import BertDataModule, BertModule, MegatronStrategy, T5DataModule, T5Module
from lightning_megatron.device import CPU
from lightning_megatron.testing.trainer import kind_in_tests
from lightning_megatron.tools.cli.main import main
from lightning_megatron.tools.recipes.names import recipe_files
from lightning_megatron.tools.rehearsal.rehearse import rehearse

pytest.importorskip("tokenizers")
pytestmark = pytest.mark.skipif(kind_in_tests() is not CPU, reason="what is rehearsed is a run on a CPU")

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(95))]
SIZES: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64, "vocab_size": 256}


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    (tmp_path / "vocab.txt").write_text("\n".join(PIECES))
    return tmp_path / "vocab.txt"


def trainer(ranks: int, **strategy: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=MegatronStrategy(micro_batch_size=2, **strategy),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@pytest.mark.slow
def test_a_pipeline_of_t5(vocabulary: Path) -> None:
    data = T5DataModule(
        vocabulary.parent / "none", 24, 10, "BertWordPieceLowerCase", vocab_file=vocabulary, batch_size=4
    )
    module = T5Module("t5-tiny", num_layers=4, head_dim=8, **SIZES)
    first, last = (rehearse(trainer(2, pp=2), module, data, rank=rank, all_micro_batches=True) for rank in range(2))
    assert (first.layers, last.layers) == ((0, 1), (2, 3))
    assert first.peak > first.after_step
    # Two micro-batches of two samples: both streams, in fp32.
    sent = 2 * (24 + 10) * 2 * 32 * 4
    assert first.traffic["pp"]["send"].nbytes == last.traffic["pp"]["send"].nbytes == sent
    # Half of the decoder's own scores are hidden: they are computed, and not counted.
    hidden = 3 * 2 * 2 * 4 * 2 * 4 * 8 * 10 * 10 / 2
    expected = module.batch_flops(data.example_batch(4)) + hidden
    assert first.flops + last.flops == pytest.approx(expected, rel=0.02)


@pytest.mark.slow
def test_bert(vocabulary: Path) -> None:
    data = BertDataModule(vocabulary.parent / "none", 24, vocabulary, batch_size=4)
    module = BertModule("bert-tiny", num_layers=2, **SIZES, max_position_embeddings=24)
    found = rehearse(trainer(2, tp=2), module, data)
    assert found.layers == (0, 1)
    assert found.peak > found.after_step
    assert torch.tensor(list(found.by_cause.values())).sum() == found.peak


RECIPES = {"bert-tiny": 2, "t5-tiny": 4, "bert-large": 8, "t5-11b": 8}
"""Ranks of the recipes."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=pytest.mark.slow if "tiny" in each else pytest.mark.exhaustive) for each in RECIPES],
)
def test_a_recipe_runs_at_its_true_size(name: str, vocabulary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", str(*recipe_files(name)), f"--data.vocab_file={vocabulary}"]
    if name.startswith("t5"):
        words += ["--data.tokenizer_type=BertWordPieceLowerCase", "--data.tokenizer_model=null"]
    assert main(["rehearse", *words, "--json"]) == 0
    out = capsys.readouterr().out
    found, *_ = json.loads(out[out.index("[\n") :])  # of a pipeline, a rank of its first stage is first
    assert found["world_size"] == RECIPES[name]
    causes = found["after_step_by_cause"]
    assert causes["gradients"] == pytest.approx(causes["parameters"] * 2, rel=1e-3)  # fp32 beside bf16
    assert found["peak"] > found["after_step"] > causes["parameters"] + causes["optimizer state"]
