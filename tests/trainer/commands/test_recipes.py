"""The Mixtral recipes: the one for 32 devices passes every check, its twin trains on a CPU from the command line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from lightning_megatron import MegatronHPUStrategy, MixtralModule
from lightning_megatron.config.layout import BatchShape, ParallelLayout
from lightning_megatron.data import IndexedDatasetWriter
from lightning_megatron.lightning.validation.job import Job, job_problems
from lightning_megatron.lightning.validation.settings import JobSettings
from lightning_megatron.machine.job_environment import own_environment
from lightning_megatron.moe.capacity_bins import bins_problems
from lightning_megatron.ops.registry import ANY_DEVICE
from lightning_megatron.pipeline.partition import LayerSplit

RECIPES = Path(__file__).parents[3] / "lightning_megatron" / "tools" / "recipes"


def recipe(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((RECIPES / name).read_text())
    return found


def built(given: dict[str, Any]) -> tuple[MegatronHPUStrategy, MixtralModule, BatchShape]:
    strategy = MegatronHPUStrategy(**given["trainer"]["strategy"]["init_args"])
    module = MixtralModule(**given["model"]["init_args"], **given["model"]["dict_kwargs"])
    data = given["data"]["init_args"]
    return strategy, module, BatchShape(data["batch_size"], strategy.micro_batch_size, data["seq_length"])


class Fed:
    """Something that knows its batches, as a data module does."""

    def __init__(self, shape: BatchShape) -> None:
        self.batch_shape = shape


def problems(given: dict[str, Any], world: int, **layout: int) -> list[str]:
    strategy, module, shape = built(given)
    wished = ParallelLayout(tp=given["trainer"]["strategy"]["init_args"]["tp"], **layout).resolve(world)
    objects = [module, Fed(shape)]
    settings = JobSettings(wished, LayerSplit(), strategy.recompute, micro_batch_size=1)
    found = job_problems(Job(settings, wished, ANY_DEVICE, torch.bfloat16, objects))
    return [str(problem) for problem in found]


def test_the_recipe_for_32_devices_passes_every_check():
    given = recipe("mixtral-8x7b.yaml")
    world = given["trainer"]["devices"] * given["trainer"]["num_nodes"]
    assert world == 32
    assert problems(given, world) == []
    _, module, shape = built(given)
    assert module.config.num_parameters() == 46_702_792_704
    assert shape.batch_size * 4 == 128, "2^22 tokens a step"
    assert shape.batch_size * 4 * shape.seq_length == 2**22
    assert bins_problems(module.config, shape.seq_length // 8) == [], "4096 tokens of a rank"
    assert problems(given, world, ep=8, etp=1) == [], "and with expert parallelism instead of cut experts"


def test_ways_in_which_experts_cannot_run_are_told_before_any_process_starts():
    given = recipe("mixtral-8x7b.yaml")
    assert problems(given, 32, ep=16, etp=1) == ["ep=16: 8 experts do not split over 16 ranks; nearest valid: 8, 4, 2"]
    given["data"]["init_args"]["seq_length"] = 4096
    (bins,) = problems(given, 32)
    assert bins.startswith("moe_capacity_bins=10: between the 128 rows of an even load and the 512 tokens of a rank")
    module = MixtralModule("mixtral-tiny", moe_dynamic=True)
    layout = ParallelLayout().resolve(1)
    strategy = MegatronHPUStrategy()
    settings = JobSettings(layout, LayerSplit(), strategy.recompute)
    (fp16,) = job_problems(Job(settings, layout, ANY_DEVICE, torch.float16, [module]))
    assert str(fp16) == "precision='16-mixed': moe_dynamic computes in bf16 or fp32; nearest valid: bf16-mixed, 32-true"


@pytest.mark.slow
def test_the_twin_trains_from_the_command_line(tmp_path):
    generator = np.random.default_rng(0)
    with IndexedDatasetWriter(tmp_path / "tokens", dtype=np.uint16) as writer:
        for _ in range(40):
            writer.add_item(generator.integers(0, 4096, 200))
            writer.end_document()
    words = ["fit", f"--config={RECIPES / 'mixtral-tiny.yaml'}", f"--data.data_path={tmp_path / 'tokens'}"]
    words += ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false", "--data.split=80,20,0"]
    words += ["--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={tmp_path / 'logs'}"]
    command = [sys.executable, "-m", "lightning_megatron.tools.cli.main", *words]
    env = own_environment()
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    tables = re.findall(
        r"tokens that chose each expert, steps (\d+) to (\d+)\n(.*\n) +0 +(.*)\n +1 +(.*)\n", done.stderr + done.stdout
    )
    assert [(int(first), int(last)) for first, last, *_ in tables] == [(1, 5), (6, 10)]
    tokens = 64 * 2 * (2 * 2) * 5  # length x choices x global batch x steps of a window
    for *_, header, first, second in tables:
        assert header.split()[-2:] == ["tokens", "max/mean"]
        assert int(first.split()[-2]) == int(second.split()[-2]) == tokens
    (log,) = (tmp_path / "logs").rglob("metrics.csv")
    columns = log.read_text().splitlines()[0].split(",")
    assert {"load_balancing_loss", "expert_imbalance", "train_loss", "val_loss", "grad_norm"} <= set(columns)
