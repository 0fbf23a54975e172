"""GPT-3 and LLaMA 2: shapes, layouts and batches as published; each passes every check, fits, and can be built."""

from __future__ import annotations

import csv
import subprocess
import sys
from math import prod
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
from lightning_megatron.stage import StageBoundary
from lightning_megatron.tools.cli.recipes.job import Given, read_recipe
from lightning_megatron.tools.planning.memory.peak import memory_of
from lightning_megatron.tools.recipes.names import recipe_files, recipe_names

# recipe: parameters; dp, tp, pp, vpp; samples of a micro-batch and of a step
CASES = {
    "gpt3-1.7b": (1_652_230_656, (32, 1, 1, 1), 16, 512),
    "gpt3-3.6b": (3_562_168_320, (32, 2, 1, 1), 16, 512),
    "gpt3-7.5b": (7_467_786_240, (32, 4, 1, 1), 16, 512),
    "gpt3-18.4b": (18_449_756_160, (32, 8, 1, 1), 8, 1024),
    "gpt3-39.1b": (39_096_041_472, (32, 8, 2, 1), 4, 1536),
    "gpt3-76.1b": (76_050_739_200, (32, 8, 4, 3), 2, 1792),
    "gpt3-145.6b": (145_622_261_760, (24, 8, 8, 2), 2, 2304),
    "gpt3-310.1b": (310_130_540_544, (15, 8, 16, 2), 1, 2160),
    "llama2-7b": (6_738_415_616, (2, 2, 2, 1), 1, 1024),
    "llama2-13b": (13_015_864_320, (4, 2, 2, 1), 2, 1024),
    "llama2-70b": (68_976_648_192, (1, 8, 4, 1), 1, 1024),
}
SMALLEST_GPU = 78.3 * 2**30
"""Memory for tensors on a card of 80 GB."""
WORST = ("gpt3-1.7b",)
"""Twins that train in seconds: two processes."""
ENCODERS = ("bert", "t5")


@pytest.mark.parametrize("name", CASES)
def test_a_recipe_is_as_published_and_fits(name: str) -> None:
    parameters, axes, micro, samples = CASES[name]
    job = read_recipe(recipe_files(name), Given())
    layout = job.layout
    assert job.config.num_parameters() == parameters
    assert (layout.data_parallel_size, layout.tp, layout.pp, layout.vpp) == axes
    assert (job.micro_batch_size, job.global_batch_size) == (micro, samples)
    assert job.seq_length == job.config.max_position_embeddings
    assert job.recompute.granularity == ("full" if name.startswith("gpt3") else None)
    assert all(memory_of(job, rank).peak < SMALLEST_GPU for rank in range(layout.pp))


@pytest.mark.parametrize("name", CASES)
def test_every_stage_can_be_built_and_together_they_hold_the_model(name: str) -> None:
    job = read_recipe(recipe_files(name), Given())
    whole: dict[str, int] = {}
    for part in job.stages:
        with torch.device("meta"):
            mesh = ParallelMesh(job.layout, job.layout.world_size // job.layout.pp * part.rank)
            built = GPTModel(job.config, mesh, [part], StageBoundary(job.layout.pp))
        whole |= {key: prod(spec.global_shape) for key, spec in spec_registry(built).items()}
    assert sum(whole.values()) == job.config.num_parameters()


@pytest.mark.parametrize("name", CASES)
def test_a_recipe_passes_every_check(name: str, tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "corpus", np.dtype(np.int32)) as writer:
        for _ in range(300):
            writer.add_item(np.arange(100, dtype=np.int32))
            writer.end_document()
    words = [word for file in recipe_files(name) for word in ("--config", str(file))]
    words += ["--trainer.accelerator=cpu", f"--trainer.default_root_dir={tmp_path}"]
    cli = LightningCLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        run=False,
        args=[*words, f"--data.data_path={tmp_path / 'corpus'}"],
    )
    strategy = cli.trainer.strategy
    assert isinstance(strategy, MegatronStrategy)
    parameters, (dp, tp, pp, vpp), micro, samples = CASES[name]
    assert cli.trainer.num_devices * cli.trainer.num_nodes == dp * tp * pp
    job = read_recipe(recipe_files(name), Given())
    settings = JobSettings(strategy.layout, job.split, strategy.recompute, micro_batch_size=micro)
    objects = [cli.model, cli.datamodule]
    assert job_problems(Job(settings, strategy.layout, strategy.ops, torch.bfloat16, objects)) == []
    assert cli.model.config.num_parameters() == parameters
    assert strategy.layout.vpp == vpp
    assert cli.datamodule.global_batch_size == samples


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in WORST else pytest.mark.exhaustive)
        for name in recipe_names()
        if not name.startswith(ENCODERS)
    ],
)
def test_the_layout_trains_in_small_on_a_cpu(name: str, tmp_path: Path) -> None:
    words = ["fit", "--recipe", name, "--scale", "cpu=8", "--trainer.logger=CSVLogger", "--trainer.max_steps=4"]
    words += ["--trainer.val_check_interval=4", "--trainer.enable_progress_bar=false"]
    words += [f"--trainer.logger.save_dir={tmp_path / 'logs'}", "--trainer.enable_model_summary=false"]
    command = [sys.executable, "-m", "lightning_megatron.tools.cli.main", *words]
    env = own_environment() | {"LIGHTNING_MEGATRON_OUTPUT_DIR": str(tmp_path / "runs")}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=1100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (log,) = (tmp_path / "logs").rglob("metrics.csv")
    rows = list(csv.DictReader(log.open()))
    losses = [float(row["train_loss"]) for row in rows if row.get("train_loss")]
    assert len(losses) == 4
    assert losses[0] == pytest.approx(np.log(512), rel=0.1), "as many tokens, all alike at first"
    assert any(row.get("val_loss") for row in rows)
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "runs" / f"{name}-on-cpu" / "recipe.yaml").is_file()
