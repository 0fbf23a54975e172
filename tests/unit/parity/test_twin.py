"""The twin of any job is a job that works, with the same axes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lightning_megatron.config.layout import BatchShape, ParallelLayout
from lightning_megatron.models.presets import PRESETS
from lightning_megatron.tools.cli.recipes.job import Given, read_recipe
from lightning_megatron.tools.cli.trials.parity import other_layout
from lightning_megatron.tools.parity.recipe import Settings, in_layout, twin_recipe
from lightning_megatron.tools.parity.twin import twin_layout, twin_micro_batches, twin_seq_length
from lightning_megatron.tools.recipes.contents import contents_of
from lightning_megatron.tools.recipes.names import recipe_files, recipe_names

ENCODERS = ("bert", "t5")  # `plan` has no formulas for them, and parity reads recipes as it does
RECIPES = [name for name in recipe_names() if not name.startswith(ENCODERS)]
DENSE = ("gpt2", "llama3.1-70b", "qwen3-8b", "mistral-7b", "gemma3-1b", "bloom-176b")
LAYOUTS = [
    (1, {}),
    (64, {"tp": 8}),
    (1024, {"tp": 8, "pp": 16, "vpp": 2}),
    (32, {"tp": 4, "cp": 2, "cp_comm_type": "a2a"}),
    (16, {"cp": 4, "pp": 2}),
]
EXPERTS = [(32, {"ep": 8, "tp": 1}), (32, {"tp": 4, "ep": 8, "etp": 1, "pp": 2}), (16, {"tp": 2, "ep": 2, "cp": 2})]


@pytest.mark.parametrize(
    ("name", "ranks", "axes"),
    [(name, *job) for name in DENSE for job in LAYOUTS]
    + [(name, *job) for name in ("mixtral-8x7b", "qwen3-30b-a3b") for job in [*LAYOUTS, *EXPERTS]]
    + [("glm4.5", *job) for job in EXPERTS],
)
def test_a_twin_is_small_and_fits_its_layout(name: str, ranks: int, axes: dict[str, int]) -> None:
    whole = ParallelLayout(**axes).resolve(ranks)  # type: ignore[arg-type]
    layout = twin_layout(whole)
    config = PRESETS[name].small(layout, twin_seq_length(layout))
    length, micros = twin_seq_length(layout), twin_micro_batches(layout)
    shape = BatchShape(micros, 1, length, vocab_size=config.vocab_size)
    assert layout.problems(layout.world_size, config, shape) == []
    for axis in ("tp", "pp", "cp", "ep", "etp", "vpp"):
        assert getattr(layout, axis) == getattr(whole, axis)
    assert layout.data_parallel_size <= max(2, layout.ep)
    assert config.num_parameters() < 40e6
    assert (config.norm, config.activation) == (PRESETS[name].norm, PRESETS[name].activation)
    assert bool(config.num_experts) == bool(PRESETS[name].num_experts)
    assert (0 < config.rope_head_dim < config.head_dim) == bool(PRESETS[name].rope_head_dim)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_a_twin_that_runs_in_other_layouts(name: str, tmp_path: Path) -> None:
    files = recipe_files(name)
    job = read_recipe(files, Given())
    own = twin_layout(job.layout)
    twin = twin_recipe(contents_of(files), job, tmp_path, own)
    model = twin["model"]["init_args"]["config"]
    for against in ("", "pp=1,vpp=1", "dp=1,ep=1,etp=1"):
        layout = other_layout(own, against)
        run = in_layout(twin, own, layout, Settings())
        (tmp_path / "twin.yaml").write_text(yaml.safe_dump(run))
        job = read_recipe([str(tmp_path / "twin.yaml")], Given())
        assert job.layout.world_size == layout.world_size
        assert sum(len(stage.layers) for stage in job.stages) == model["num_layers"]
