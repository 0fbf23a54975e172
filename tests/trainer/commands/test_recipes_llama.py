"""The LLaMA 3.1 recipes: read by the command line's own parser, checked as a job, built on the meta device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI

from lightning_megatron import MegatronStrategy
from lightning_megatron.config.counts import padded_vocab_size
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.data import IndexedDatasetWriter
from lightning_megatron.lightning.validation.job import Job, job_problems
from lightning_megatron.lightning.validation.settings import JobSettings
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.pipeline.partition import LayerSplit
from lightning_megatron.tools.recipes.names import recipe_files, recipe_names

# recipe: ranks, dp, tp, cp, sequence length, tokens of a step
CASES = {
    "llama3.1-8b": (8, 4, 2, 1, 8192),
    "llama3.1-8b-32k": (8, 2, 4, 1, 32768),
    "llama3.1-8b-32k-cp": (8, 1, 1, 8, 32768),
    "llama3.1-70b": (64, 8, 8, 1, 8192),
    "llama3.1-70b-32k": (32, 4, 8, 1, 32768),
    "llama3.1-70b-32k-cp": (32, 2, 8, 2, 32768),
}
PARAMETERS = {"8b": 8_030_261_248, "70b": 70_553_706_496}


def parsed(name: str, tmp_path: Path) -> LightningCLI:
    """The job of a recipe, as ``fit`` would build it, on CPUs and not started."""
    words = [word for file in recipe_files(name) for word in ("--config", str(file))]
    return LightningCLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        run=False,
        args=[
            *words,
            "--trainer.accelerator=cpu",
            f"--trainer.default_root_dir={tmp_path}",
            f"--data.data_path={corpus(tmp_path)}",  # a recipe names files that its user makes
        ],
    )


def corpus(folder: Path) -> str:
    """A pair of files that can be read."""
    prefix = str(folder / "corpus")
    with IndexedDatasetWriter(prefix, np.dtype(np.int32)) as writer:
        for _ in range(300):
            writer.add_item(np.arange(100, dtype=np.int32))
            writer.end_document()
    return prefix


@pytest.mark.parametrize("name", CASES)
def test_a_recipe_passes_every_check_and_its_model_can_be_built(name: str, tmp_path: Path) -> None:
    world, dp, tp, cp, length = CASES[name]
    cli = parsed(name, tmp_path)
    strategy = cli.trainer.strategy
    assert isinstance(strategy, MegatronStrategy)
    layout = strategy.layout
    assert (layout.data_parallel_size, layout.tp, layout.pp, layout.cp) == (dp, tp, 1, cp)
    assert dp * tp * cp == world == cli.trainer.num_devices * cli.trainer.num_nodes
    settings = JobSettings(layout, LayerSplit(), strategy.recompute, micro_batch_size=1)
    found = job_problems(Job(settings, layout, strategy.ops, torch.bfloat16, [cli.model, cli.datamodule]))
    assert found == []
    shape = cli.datamodule.batch_shape
    assert shape.seq_length == length
    assert shape.batch_size * dp * length == 2048 * 8192

    config = cli.model.config
    assert config.num_parameters() == PARAMETERS[name.split("-")[1]]
    with torch.device("meta"):
        model = GPTModel(config, ParallelMesh(layout), recompute=strategy.recompute)
    mine = sum(p.numel() for p in model.parameters())
    norms = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    rows = padded_vocab_size(config.vocab_size, tp) - config.vocab_size
    assert (mine - norms) * tp + norms == config.num_parameters() + 2 * rows * config.hidden_size


def test_the_files_with_differences_name_only_what_differs(tmp_path: Path) -> None:
    long = parsed("llama3.1-8b-32k", tmp_path)
    base = parsed("llama3.1-8b", tmp_path)
    assert long.model.config == base.model.config
    assert long.model.lr == base.model.lr == 3e-4
    assert long.trainer.max_steps == base.trainer.max_steps
    assert isinstance(base.trainer.strategy, MegatronStrategy)
    assert base.trainer.strategy.layout == ParallelLayout(tp=2).resolve(8)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("llama3.1")])
def test_on_gaudi_recipes_are_compiled_and_attend_by_its_kernel(name: str, tmp_path: Path) -> None:
    """Op by op a Gaudi is several times slower, and a ring's pieces of keys go through no kernel of it."""
    settings = parsed(name, tmp_path).trainer.strategy.settings
    assert settings["compile"] is True
    if name.endswith("-cp"):  # Intel switches the fast softmax off with cp
        assert (settings["ops"], settings["cp_comm_type"]) == ("attention=auto", "a2a")
    else:
        assert settings["ops"] == "attention=fast_softmax"


def test_every_recipe_for_gaudi_is_compiled() -> None:
    """A tiny one would wait for the compiler only."""
    files = {name: recipe_files(name)[0] for name in recipe_names()}
    strategies = {name: yaml.safe_load(file.read_text())["trainer"]["strategy"] for name, file in files.items()}
    made_for_it = {name for name, each in strategies.items() if each["class_path"].endswith("MegatronHPUStrategy")}
    assert made_for_it >= {"llama2-7b", "llama3.1-8b", "mixtral-8x7b", "bloom-13b", "t5-11b"}
    large = {name for name in made_for_it if not name.endswith("-tiny")}
    assert [name for name in sorted(large) if strategies[name]["init_args"].get("compile") is not True] == []
