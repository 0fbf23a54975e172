"""The DeepSeek recipes: each rank of those for 512 and 2048 devices can be built, their twins train on CPUs."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from lightning_megatron.config.layout import BatchShape, ParallelLayout
from lightning_megatron.data import IndexedDatasetWriter
from lightning_megatron.machine.job_environment import own_environment
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.models.presets import configuration
from lightning_megatron.params import named_specs, spec_registry
from lightning_megatron.pipeline.partition import LayerSplit
from lightning_megatron.stage import StageBoundary

RECIPES = Path(__file__).parents[3] / "lightning_megatron" / "tools" / "recipes"


# V3's total is the published one, and the module for a further token.
@pytest.mark.parametrize(
    ("name", "devices", "replicas", "samples", "total", "most"),
    [
        ("deepseek-v2", 512, 32, 9_216, 235_741_434_880, 3.0e9),
        ("deepseek-v3", 2048, 128, 15_360, 671_026_404_352 + 11_610_067_968, 3.3e9),
    ],
)
def test_every_rank_of_the_recipe_can_be_built_and_together_they_hold_the_model(
    name: str, devices: int, replicas: int, samples: int, total: int, most: float
) -> None:
    recipe: dict[str, Any] = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    model, data, trainer = recipe["model"], recipe["data"]["init_args"], recipe["trainer"]
    arguments = trainer["strategy"]["init_args"]
    config = configuration(model["init_args"]["config"], **model["dict_kwargs"])
    world_size = trainer["devices"] * trainer["num_nodes"]
    layout = ParallelLayout(pp=arguments["pp"], ep=arguments["ep"]).resolve(world_size)
    assert (world_size, layout.data_parallel_size) == (devices, replicas)
    batch_size = data.get("batch_size") or data["global_batch_size"] // replicas
    assert batch_size * replicas == samples
    batch = BatchShape(batch_size, arguments["micro_batch_size"], data["seq_length"])
    split = LayerSplit(layout=arguments["pipeline_layout"])
    found = [problem for problem in layout.problems(world_size, config, batch) if problem.argument not in ("pp", "vpp")]
    assert [problem for problem in found if problem.argument != "pp x vpp"] == []

    whole: dict[str, tuple[int, ...]] = {}
    held = []
    for part in split.stages(config.num_layers, layout.pp, layout.vpp, config.loss_cost):
        with torch.device("meta"):
            mesh = ParallelMesh(layout, layout.data_parallel_size * part.rank)
            built = GPTModel(config, mesh, [part], StageBoundary(layout.pp))
        whole |= {name: spec.global_shape for name, spec in spec_registry(built).items()}
        held.append(sum(param.numel() for _, param, _ in named_specs(built)))
    assert sum(torch.Size(shape).numel() for shape in whole.values()) == total
    assert max(held) < most


@pytest.mark.exhaustive
@pytest.mark.parametrize("version", ["v2", "v3"])
def test_the_twin_trains_from_the_command_line(tmp_path: Path, version: str) -> None:
    generator = np.random.default_rng(0)
    with IndexedDatasetWriter(tmp_path / "tokens", dtype=np.uint16) as writer:
        for _ in range(80):
            writer.add_item(generator.integers(0, 4096, 200))
            writer.end_document()
    words = ["fit", f"--config={RECIPES}/deepseek-{version}-tiny.yaml", f"--data.data_path={tmp_path / 'tokens'}"]
    words += ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false", "--data.split=80,20,0"]
    words += ["--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={tmp_path / 'logs'}"]
    command = [sys.executable, "-m", "lightning_megatron.tools.cli.main", *words]
    env = own_environment()
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (log,) = (tmp_path / "logs").rglob("metrics.csv")
    rows = list(csv.DictReader(log.read_text().splitlines()))
    for name in ("train_loss", *(["mtp_1_loss"] if version == "v3" else [])):
        losses = [float(row[name]) for row in rows if row.get(name)]
        assert len(losses) == 2
        assert losses[1] == pytest.approx(np.log(4096), rel=0.05), "random tokens"
