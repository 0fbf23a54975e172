"""The Qwen3 recipes: the one for 16 devices is planned to fit, its twin trains on a CPU from the command line."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lightning_megatron.data import IndexedDatasetWriter
from lightning_megatron.machine.job_environment import own_environment
from lightning_megatron.tools.cli.recipes.job import Given, read_recipe
from lightning_megatron.tools.planning.memory.peak import memory_of

RECIPES = Path(__file__).parents[3] / "lightning_megatron" / "tools" / "recipes"


def test_the_recipe_for_16_devices_fits_80_gb() -> None:
    job = read_recipe([str(RECIPES / "qwen3-30b-a3b.yaml")], Given())
    assert job.config.num_parameters() == 30_532_122_624
    assert (job.world_size, job.layout.ep, job.layout.data_parallel_size) == (16, 8, 16)
    assert job.tokens_per_step == 2**20
    assert memory_of(job, 0).peak < 78.3 * 2**30


@pytest.mark.slow
def test_the_twin_trains_from_the_command_line(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    with IndexedDatasetWriter(tmp_path / "tokens", dtype=np.uint16) as writer:
        for _ in range(80):
            writer.add_item(generator.integers(0, 4096, 200))
            writer.end_document()
    words = ["fit", f"--config={RECIPES / 'qwen3-moe-tiny.yaml'}", f"--data.data_path={tmp_path / 'tokens'}"]
    words += ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false", "--data.split=80,20,0"]
    words += ["--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={tmp_path / 'logs'}"]
    command = [sys.executable, "-m", "lightning_megatron.tools.cli.main", *words]
    env = own_environment()
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (log,) = (tmp_path / "logs").rglob("metrics.csv")
    losses = [float(row["train_loss"]) for row in csv.DictReader(log.read_text().splitlines()) if row["train_loss"]]
    assert len(losses) == 2
    assert losses[1] == pytest.approx(np.log(4096), rel=0.05), "random tokens"
