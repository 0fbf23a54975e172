"""A training job in numbers checks itself."""

from __future__ import annotations

import pytest

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.presets import preset
from lightning_megatron.pipeline.partition import LayerSplit
from lightning_megatron.tools.planning.core.job import PlannedJob


def test_sizes_of_a_step():
    job = PlannedJob(preset("llama2-70b"), ParallelLayout(tp=8, pp=4).resolve(1024), 4096, 1, 32)
    assert job.global_batch_size == 1024
    assert job.tokens_per_step == 1024 * 4096
    assert [len(stage.layers) for stage in job.stages] == [20] * 4
    assert job.stages_of(3)[0].has_loss
    assert job.schedule_name == "1f1b"
    assert len(job.actions[0]) == 64


def test_every_fault_is_told_at_once():
    layout = ParallelLayout(tp=3, pp=5).resolve(15)
    with pytest.raises(ConfigError) as raised:
        PlannedJob(preset("llama2-7b"), layout, 4096, 1, 8, schedule="interleaved")
    assert {problem.argument for problem in raised.value.problems} >= {"tp", "vpp", "pp"}


def test_words_and_numbers_are_checked():
    with pytest.raises(ConfigError) as raised:
        PlannedJob(preset("gpt2"), ParallelLayout().resolve(1), 1024, 0, 1, precision="bf16")
    assert {problem.argument for problem in raised.value.problems} == {"micro_batch_size", "precision"}


def test_an_open_layout_is_refused():
    with pytest.raises(ConfigError) as raised:
        PlannedJob(preset("gpt2"), ParallelLayout(), 1024, 1, 1)
    assert raised.value.problems[0].argument == "dp"


def test_an_uneven_split_holds_layers_that_do_not_divide():
    split = LayerSplit(first_stage_layers=7, last_stage_layers=7)
    layout = ParallelLayout(pp=4).resolve(4)
    job = PlannedJob(preset("llama2-7b"), layout, 4096, 1, 8, split=split)
    assert [len(stage.layers) for stage in job.stages] == [7, 9, 9, 7]
    with pytest.raises(ConfigError, match="first_stage_layers"):
        PlannedJob(preset("llama2-7b"), layout, 4096, 1, 8, split=LayerSplit(first_stage_layers=6))
