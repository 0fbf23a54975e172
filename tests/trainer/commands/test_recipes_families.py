"""Recipes of the families: those for many devices are planned to fit and can be built, their twins train on CPUs."""

from __future__ import annotations

import csv
import subprocess
import sys
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI

from lightning_megatron import MegatronStrategy
from lightning_megatron.data import IndexedDatasetWriter
from lightning_megatron.encoders.bert.model import BertModel
from lightning_megatron.lightning.validation.job import Job, job_problems
from lightning_megatron.lightning.validation.settings import JobSettings
from lightning_megatron.machine.job_environment import own_environment
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.params import spec_registry
from lightning_megatron.pipeline.partition import LayerSplit
from lightning_megatron.stage import StageBoundary
from lightning_megatron.tools.cli.main import main
from lightning_megatron.tools.cli.recipes.job import Given, read_recipe
from lightning_megatron.tools.planning.memory.peak import memory_of
from lightning_megatron.tools.recipes.names import recipe_files

RECIPES = Path(__file__).parents[3] / "lightning_megatron" / "tools" / "recipes"
# recipe: parameters; ranks, dp, tp, pp, ep; its twin
CASES = {
    "qwen2.5-7b": (7_615_616_512, (8, 4, 2, 1, 1), "qwen2.5-tiny"),
    "qwen3-8b": (8_190_735_360, (8, 4, 2, 1, 1), "qwen3-tiny"),
    "mistral-7b": (7_241_732_096, (8, 4, 2, 1, 1), "mistral-tiny"),
    "gemma2-9b": (9_241_705_984, (16, 4, 2, 2, 1), "gemma2-tiny"),
    "gemma3-4b": (3_880_263_168, (8, 4, 2, 1, 1), "gemma3-tiny"),
    "gpt-oss-20b": (20_914_757_184, (16, 8, 2, 1, 8), "gpt-oss-tiny"),
}
SMALLEST_GPU = 78.3 * 2**30
"""Memory for tensors on a card of 80 GB."""
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "a", "mat", "dog", "ran", "."]


@pytest.mark.parametrize("name", CASES)
def test_a_recipe_fits_its_devices(name: str) -> None:
    parameters, (ranks, *axes), twin = CASES[name]
    job = read_recipe([str(RECIPES / f"{name}.yaml")], Given())
    assert job.config.num_parameters() == parameters
    assert job.world_size == ranks
    assert [job.layout.data_parallel_size, job.layout.tp, job.layout.pp, job.layout.ep] == axes
    assert job.tokens_per_step == 2**20
    assert all(memory_of(job, rank).peak < SMALLEST_GPU for rank in range(job.layout.pp))

    small = read_recipe([str(RECIPES / f"{twin}.yaml")], Given())
    assert small.world_size <= 4
    for axis in ("tp", "pp", "etp"):
        assert getattr(small.layout, axis) == getattr(job.layout, axis)
    assert (small.layout.ep > 1) == (job.layout.ep > 1)
    kinds = ("activation", "qk_norm", "attention_sinks", "attention_softcap", "post_norms", "add_qkv_bias")
    for field in (*kinds, "moe_linear_bias", "rope_local_theta", "logit_softcap"):
        assert getattr(small.config, field) == getattr(job.config, field), field
    windows = [[bool(config.window(n)) for n in range(2)] for config in (small.config, job.config)]
    assert windows[0] == windows[1]
    assert small.config.sliding_window < small.seq_length, "a window that hides nothing shows nothing"


@pytest.mark.parametrize("name", [*CASES, "qwen3-30b-a3b"])
def test_every_stage_of_a_recipe_can_be_built_and_together_they_hold_the_model(name: str) -> None:
    job = read_recipe([str(RECIPES / f"{name}.yaml")], Given())
    whole: dict[str, int] = {}
    for part in job.stages:
        with torch.device("meta"):
            mesh = ParallelMesh(job.layout, job.layout.world_size // job.layout.pp * part.rank)
            built = GPTModel(job.config, mesh, [part], StageBoundary(job.layout.pp))
        whole |= {key: prod(spec.global_shape) for key, spec in spec_registry(built).items()}
    assert sum(whole.values()) == job.config.num_parameters()


def test_the_recipe_of_bert_passes_every_check_and_can_be_built(tmp_path: Path) -> None:
    sentences, vocabulary = bert_data(tmp_path)
    words = ["--config", str(*recipe_files("bert-large")), "--trainer.accelerator=cpu"]
    words += [f"--data.data_path={sentences}", f"--data.vocab_file={vocabulary}"]
    cli = LightningCLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        run=False,
        args=[*words, f"--trainer.default_root_dir={tmp_path}"],
    )
    strategy = cli.trainer.strategy
    assert isinstance(strategy, MegatronStrategy)
    layout = strategy.layout
    assert layout.data_parallel_size == 8
    settings = JobSettings(layout, LayerSplit(), strategy.recompute, micro_batch_size=16)
    assert job_problems(Job(settings, layout, strategy.ops, torch.bfloat16, [cli.model, cli.datamodule])) == []
    with torch.device("meta"):
        model = BertModel(cli.model.config, ParallelMesh(layout))
    rows = -cli.model.config.vocab_size % cli.model.config.vocab_multiple
    assert sum(param.numel() for param in model.parameters()) == 336_226_108 + rows * (1024 + 1)


def text_data(folder: Path) -> Path:
    """Documents of 4096 different tokens at random."""
    generator = np.random.default_rng(0)
    with IndexedDatasetWriter(folder / "tokens", dtype=np.uint16) as writer:
        for _ in range(80):
            writer.add_item(generator.integers(0, 4096, 200))
            writer.end_document()
    return folder / "tokens"


def bert_data(folder: Path) -> tuple[Path, Path]:
    """Documents of sentences, and their vocabulary."""
    vocabulary, corpus = folder / "vocab.txt", folder / "corpus.jsonl"
    vocabulary.write_text("\n".join(WORDS) + "\n")
    corpus.write_text('{"text": "The cat sat on a mat. The dog ran. A dog sat on the cat. The mat ran on."}\n' * 400)
    words = ["--input", str(corpus), "--output-prefix", str(folder / "corpus"), "--split-sentences"]
    words += ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(vocabulary)]
    assert main(["preprocess", *words]) == 0
    return folder / "corpus_text_sentence", vocabulary


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*(twin for *_, twin in CASES.values()), "bert-tiny"])
def test_a_twin_trains_from_the_command_line(name: str, tmp_path: Path) -> None:
    (recipe,) = recipe_files(name)
    words = ["fit", f"--config={recipe}", "--data.split=80,20,0", "--trainer.logger=CSVLogger"]
    if name.startswith("bert"):
        sentences, vocabulary = bert_data(tmp_path)
        words += [f"--data.data_path={sentences}", f"--data.vocab_file={vocabulary}"]
    else:
        words.append(f"--data.data_path={text_data(tmp_path)}")
    words += ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
    command = [sys.executable, "-m", "lightning_megatron.tools.cli.main", *words]
    command.append(f"--trainer.logger.save_dir={tmp_path / 'logs'}")
    env = own_environment()
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (log,) = (tmp_path / "logs").rglob("metrics.csv")
    losses = [float(row["train_loss"]) for row in csv.DictReader(log.read_text().splitlines()) if row["train_loss"]]
    assert len(losses) == yaml.safe_load(recipe.read_text())["trainer"]["max_steps"] // 5
    assert np.isfinite(losses).all()
    if not name.startswith("bert"):
        assert losses[-1] == pytest.approx(np.log(4096), rel=0.05), "random tokens"
