"""The BLOOM recipes: the one for 8 devices passes every check and can be built, its twin trains on CPUs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI

from lightning_megatron import MegatronStrategy
from lightning_megatron.data import IndexedDatasetWriter
from lightning_megatron.lightning.validation.job import Job, job_problems
from lightning_megatron.lightning.validation.settings import JobSettings
from lightning_megatron.machine.job_environment import own_environment
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.params import spec_registry
from lightning_megatron.pipeline.partition import LayerSplit
from lightning_megatron.stage import StageBoundary

RECIPES = Path(__file__).parents[3] / "lightning_megatron" / "tools" / "recipes"


def corpus(folder: Path) -> str:
    """A pair of files that can be read."""
    prefix = str(folder / "corpus")
    generator = np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, np.dtype(np.int32)) as writer:
        for _ in range(300):
            writer.add_item(generator.integers(0, 4096, 100).astype(np.int32))
            writer.end_document()
    return prefix


def parsed(name: str, folder: Path) -> LightningCLI:
    """The job of a recipe, as ``fit`` would build it, on CPUs and not started."""
    words = ["--config", str(RECIPES / name), "--trainer.accelerator=cpu", f"--data.data_path={corpus(folder)}"]
    return LightningCLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        run=False,
        args=[*words, f"--trainer.default_root_dir={folder}"],
    )


def test_the_recipe_passes_every_check_and_the_model_of_each_rank_can_be_built(tmp_path: Path) -> None:
    cli = parsed("bloom-13b.yaml", tmp_path)
    strategy, config = cli.trainer.strategy, cli.model.config
    assert isinstance(strategy, MegatronStrategy)
    layout = strategy.layout
    assert (layout.pp, layout.tp, layout.data_parallel_size) == (2, 4, 1)
    settings = JobSettings(layout, LayerSplit(), strategy.recompute, micro_batch_size=1)
    assert job_problems(Job(settings, layout, strategy.ops, torch.bfloat16, [cli.model, cli.datamodule])) == []
    plan = cli.datamodule.sample_plan
    assert plan.layout_problems(layout, 1, accumulated=1) == []
    assert cli.datamodule.batch_shape.global_batch_size == plan.global_batch(dp=1) == 1024
    assert plan.batches(dp=1) == 311_541, "of 300,000,000 samples, 5,000,000 of them with a smaller batch"
    assert cli.model.counts_samples
    assert cli.trainer.max_steps == -1
    assert config.num_parameters() == 12_855_592_960
    assert config.position_embedding == "learned"
    assert (config.hidden_dropout, config.attention_dropout, config.head_dim) == (0.1, 0.1, 160)

    whole: dict[str, tuple[int, ...]] = {}
    for part in LayerSplit().stages(config.num_layers, layout.pp, layout.vpp):
        with torch.device("meta"):
            model = GPTModel(config, ParallelMesh(layout, 4 * part.rank), [part], StageBoundary(2))
        whole |= {name: spec.global_shape for name, spec in spec_registry(model).items()}
    assert sum(torch.Size(shape).numel() for shape in whole.values()) == 12_855_592_960


@pytest.mark.exhaustive
def test_the_twin_trains_from_the_command_line(tmp_path: Path) -> None:
    words = ["fit", f"--config={RECIPES / 'bloom-tiny.yaml'}", f"--data.data_path={corpus(tmp_path)}"]
    words += ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false", "--data.split=80,20,0"]
    words += ["--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={tmp_path / 'logs'}"]
    command = [sys.executable, "-m", "lightning_megatron.tools.cli.main", *words]
    env = own_environment()
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (log,) = (tmp_path / "logs").rglob("metrics.csv")
    assert {"train_loss", "val_loss", "grad_norm"} <= set(log.read_text().splitlines()[0].split(","))
