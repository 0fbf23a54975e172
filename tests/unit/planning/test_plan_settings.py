"""Jobs from arguments of the strategy and back, and from recipes."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

import lightning_megatron
from lightning_megatron import (
    BertModule,
    BloomModule,
    GPTModule,
    LlamaModule,
    MegatronStrategy,
    MixtralModule,
    T5Module,
)
from lightning_megatron.errors import ConfigError
from lightning_megatron.families import DEFAULT_PRESETS
from lightning_megatron.models.presets import preset
from lightning_megatron.tools.cli.plan.text import recipe_text
from lightning_megatron.tools.cli.recipes.job import STRATEGIES, Given, read_recipe
from lightning_megatron.tools.planning.settings import Feed, job_of, strategy_arguments
from lightning_megatron.tools.recipes.contents import merged
from lightning_megatron.tools.recipes.names import recipe_files, recipe_names

NAMES = recipe_names()
UNPLANNED = {"bert": "no formulas", "t5": "no formulas"}
"""Beginnings of the names of recipes for whose models there are no formulas, and the reasons."""
ARGUMENTS: list[tuple[str, dict[str, Any]]] = [
    ("llama3.1-8b", {"micro_batch_size": 1}),
    ("llama3.1-8b", {"tp": 2, "pp": 4, "vpp": 2, "micro_batch_size": 2, "recompute": ["mlp", "core_attn"]}),
    ("llama3.1-8b", {"tp": 2, "sequence_parallel": False, "cp": 2, "cp_comm_type": "a2a", "micro_batch_size": 1}),
    (
        "llama3.1-8b",
        {"pp": 4, "micro_batch_size": 1, "pipeline_schedule": "zero-bubble", "pipeline_layout": "balanced"},
    ),
    ("llama3.1-8b", {"pp": 4, "micro_batch_size": 1, "first_stage_layers": 7, "last_stage_layers": 5}),
    ("gpt3-1.7b", {"micro_batch_size": 4, "recompute": "full", "recompute_method": "block", "recompute_num_layers": 3}),
    (
        "gpt3-1.7b",
        {"micro_batch_size": 1, "distributed_optimizer": False, "bucket_size": 10, "grad_reduce_dtype": "bf16"},
    ),
    ("gpt3-1.7b", {"micro_batch_size": 1, "main_grads_dtype": "auto"}),
    ("gpt3-1.7b", {"micro_batch_size": 1, "overlap_grad_reduce": False, "overlap_param_gather": False}),
    ("mixtral-8x7b", {"tp": 2, "ep": 4, "etp": 1, "micro_batch_size": 1, "recompute": "moe"}),
]


@pytest.mark.parametrize(("model", "arguments"), ARGUMENTS)
def test_arguments_become_a_job_and_the_same_arguments_again(model: str, arguments: dict[str, Any]) -> None:
    job = job_of(preset(model), Feed(32, 2048, 16, accumulated=2), arguments)
    assert strategy_arguments(job) == arguments
    strategy = MegatronStrategy(**strategy_arguments(job))
    assert {name: strategy.settings[name] for name in arguments} == arguments
    assert job.global_batch_size == 16 * 2 * job.layout.data_parallel_size


def test_the_whole_batch_is_the_micro_batch_by_default() -> None:
    job = job_of(preset("gpt3-1.7b"), Feed(4, 2048, 6), {})
    assert (job.micro_batch_size, job.num_micro_batches) == (6, 1)


def test_faults_of_arguments() -> None:
    with pytest.raises(ConfigError) as raised:
        job_of(preset("gpt3-1.7b"), Feed(6, 2048, 6), {"tp": 4, "micro_batch_size": 4})
    assert {problem.argument for problem in raised.value.problems} == {"tp", "micro_batch_size"}


def test_known_modules_and_strategies_are_those_there_are() -> None:
    for module in (BertModule, BloomModule, GPTModule, LlamaModule, MixtralModule, T5Module):
        assert DEFAULT_PRESETS[module.__name__] == module.default_config
    assert len(DEFAULT_PRESETS) == 6
    assert {name for name in STRATEGIES if hasattr(lightning_megatron, name)} == {
        "MegatronStrategy",
        "MegatronHPUStrategy",
    }


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(tuple(UNPLANNED))])
def test_each_recipe_becomes_its_job(name: str) -> None:
    files = recipe_files(name)
    job = read_recipe(files, Given())
    recipe = merged(*(yaml.safe_load(path.read_text()) for path in (files[0], files[-1])))
    trainer, data = recipe["trainer"], recipe["data"]["init_args"]
    given = trainer["strategy"]["init_args"]
    assert job.world_size == trainer["devices"] * trainer.get("num_nodes", 1)
    assert (job.layout.tp, job.layout.cp) == (given.get("tp", 1), given.get("cp", 1))
    assert job.seq_length == data["seq_length"]
    whole = data.get("global_batch_size") or data["batch_size"] * job.layout.data_parallel_size
    assert job.global_batch_size == whole
    assert job.recompute.granularity == given.get("recompute")
    assert job.precision == trainer["precision"]
    model = recipe["model"]
    assert job.config == preset(model["init_args"]["config"]).replace(**model.get("dict_kwargs", {}))


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(tuple(UNPLANNED))])
def test_a_recipe_of_a_model_without_formulas_is_refused_by_name(name: str) -> None:
    reason = next(reason for kind, reason in UNPLANNED.items() if name.startswith(kind))
    with pytest.raises(ConfigError, match=reason):
        read_recipe(recipe_files(name), Given())


def test_arguments_of_another_class_are_not_kept() -> None:
    base = {"strategy": {"class_path": "a.MegatronStrategy", "init_args": {"tp": 2}}}
    same = merged(base, {"strategy": {"class_path": "MegatronStrategy", "init_args": {"pp": 2}}})
    other = merged(base, {"strategy": {"class_path": "Other", "init_args": {"pp": 2}}})
    assert same["strategy"]["init_args"] == {"tp": 2, "pp": 2}
    assert other["strategy"]["init_args"] == {"pp": 2}


def test_everything_that_is_not_known_of_a_recipe_is_told_at_once(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(
        textwrap.dedent("""
        trainer: {devices: auto, strategy: ddp, precision: 64-true}
        model: {class_path: my.Module}
        data: {class_path: my.Data}
        """)
    )
    with pytest.raises(ConfigError) as raised:
        read_recipe([str(file)], Given())
    wanted = {"trainer.strategy", "trainer.devices", "model", "data.init_args.seq_length", "trainer.precision"}
    assert {problem.argument for problem in raised.value.problems} == wanted
    given = Given(8, 1024, 64, "bf16-mixed", preset("gpt3-1.7b"))
    file.write_text(file.read_text().replace("ddp", "megatron"))
    job = read_recipe([str(file)], given)
    assert (job.world_size, job.seq_length, job.global_batch_size) == (8, 1024, 64)


@pytest.mark.parametrize("text", ["", "- 1", "a: [", "\x00"])
def test_what_is_no_recipe(text: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="--config"):
        read_recipe([str(file)], Given())


@pytest.mark.parametrize(("model", "arguments"), ARGUMENTS)
def test_a_written_recipe_becomes_the_same_job(model: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    job = job_of(preset(model), Feed(32, 2048, 16), arguments)
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe_text(job, 8))
    assert read_recipe([str(file)], Given(config=preset(model))) == job
    trainer = yaml.safe_load(file.read_text())["trainer"]
    assert (trainer["devices"], trainer["num_nodes"]) == (8, 4)
    MegatronStrategy(**trainer["strategy"]["init_args"])
