"""Parameters of a rank, against the parameters that the model's configuration counts and whole models have."""

from __future__ import annotations

from math import prod

import pytest
import torch

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.lightning.pretrained.parameter_specs import parameter_specs
from lightning_megatron.models.presets import PRESETS, preset
from lightning_megatron.pipeline.partition import LayerSplit
from lightning_megatron.tools.planning.core.job import PlannedJob
from lightning_megatron.tools.planning.core.parameters import PlannedParameter, rank_parameters
from lightning_megatron.tools.planning.memory.states import buffer_sizes, state_bytes

PLANNED = [name for name, each in PRESETS.items() if type(each) is TransformerConfig]


def job_of(name: str, world_size: int, **sizes: object) -> PlannedJob:
    return PlannedJob(preset(name), ParallelLayout(**sizes).resolve(world_size), 1024, 1, 8)  # type: ignore[arg-type]


def parameters_of(job: PlannedJob, rank: int) -> tuple[PlannedParameter, ...]:
    return rank_parameters(job.config, job.layout, job.stages_of(rank))


def whole_size(parameters: tuple[PlannedParameter, ...]) -> int:
    """Elements over all ranks that share these layers, copies of tied embeddings not counted."""
    return sum(parameter.whole for parameter in parameters if not parameter.tied_copy)


def size_of(part: str, parameters: tuple[PlannedParameter, ...]) -> int:
    return sum(parameter.size for parameter in parameters if f".{part}" in parameter.name)


@pytest.mark.parametrize("name", PLANNED)
def test_a_model_in_one_piece_has_the_parameters_of_its_configuration(name):
    job = job_of(name, 1)
    assert whole_size(parameters_of(job, 0)) == preset(name).num_parameters()


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "llama3.2-1b",
        "mixtral-8x7b",
        "qwen2.5-0.5b",
        "qwen3-30b-a3b",
        "gemma3-1b",
        "gpt-oss-20b",
        "deepseek-v2",
        "deepseek-v2-lite",
        "glm4.5",
    ],
)
def test_the_tensors_are_those_of_the_layers(name):
    expected = [prod(spec.global_shape) for spec in parameter_specs(preset(name)).values()]
    found = [parameter.whole for parameter in parameters_of(job_of(name, 1), 0)]
    assert sorted(found) == sorted(expected)


def test_modules_for_further_tokens_are_on_the_last_stage_with_a_copy_of_the_embedding():
    config = preset("deepseek-v3").replace(mtp_num_layers=1)
    expected = [prod(spec.global_shape) for spec in parameter_specs(config).values()]
    job = PlannedJob(config, ParallelLayout().resolve(1), 1024, 1, 1)
    assert sorted(each.whole for each in parameters_of(job, 0)) == sorted(expected)
    job = PlannedJob(config, ParallelLayout(pp=2).resolve(2), 1024, 1, 1, split=LayerSplit(layout="balanced"))
    first, last = (parameters_of(job, rank) for rank in range(2))
    assert whole_size(first) + whole_size(last) == sum(expected)
    assert [each.name for each in last if each.tied_copy] == ["embedding.word.weight"]
    assert all(each.reduce_late for each in (*first, *last) if each.name == "embedding.word.weight")


@pytest.mark.parametrize("name", ["gpt3-1.7b", "mixtral-8x7b"])
def test_a_look_at_parameters_draws_no_random_number(name):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    parameters_of(job_of(name, 96, tp=2), 0)  # 96 ranks: not among the layouts of other tests
    assert torch.equal(torch.get_rng_state(), before)


def test_pipeline_ranks_hold_the_model_once():
    job = job_of("llama2-70b", 64, tp=8, pp=8)
    assert sum(whole_size(parameters_of(job, rank)) for rank in range(8)) == preset("llama2-70b").num_parameters()


def test_a_tied_embedding_has_a_copy_on_the_last_stage():
    job = job_of("gpt3-7.5b", 8, pp=4)
    last = parameters_of(job, 3)[0]
    assert last.name == "embedding.word.weight"
    assert last.tied_copy
    assert last.reduce_late
    # 36 layers of 12 h^2 + 13 h and a final norm; rows of the vocabulary are padded to 128.
    h = 4096
    assert sum(p.size for p in parameters_of(job, 3)) == 9 * (12 * h * h + 13 * h) + 51200 * h + 2 * h


def test_experts_are_cut_over_their_own_ranks():
    job = job_of("mixtral-8x7b", 16, tp=2, ep=4, etp=2)
    experts = 32 * 8 * 3 * 4096 * 14336
    assert size_of("experts", parameters_of(job, 0)) == experts // 8
    assert size_of("router", parameters_of(job, 0)) == 32 * 8 * 4096


def test_states_of_a_mixed_precision_are_18_bytes_a_parameter_on_one_rank():
    job = job_of("llama2-7b", 1)
    parameters = preset("llama2-7b").num_parameters()
    assert state_bytes(job, 0).total == pytest.approx(18 * parameters, rel=1e-5)
    assert state_bytes(job, 0).total >= 18 * parameters


@pytest.mark.parametrize(
    ("precision", "bytes_each"), [("32-true", 16), ("bf16-true", 8), ("bf16-mixed", 18), ("16-mixed", 18)]
)
def test_bytes_of_each_precision(precision, bytes_each):
    job = PlannedJob(preset("gpt2"), ParallelLayout().resolve(1), 1024, 1, 1, precision=precision)
    assert state_bytes(job, 0).total == bytes_each * buffer_sizes(job, 0).elements


def test_the_optimizer_is_cut_over_replicas_and_context_ranks():
    job = job_of("llama2-7b", 16, tp=2, cp=2)
    sizes = buffer_sizes(job, 0)
    assert sizes.owned * 8 == sizes.elements  # dp 4 x cp 2
    assert state_bytes(job, 0).total == 6 * sizes.elements + 12 * sizes.owned


def test_unsharded_optimizers_hold_everything():
    layout = ParallelLayout().resolve(8)
    job = PlannedJob(preset("gpt2"), layout, 1024, 1, 1, distributed_optimizer=False)
    sizes = buffer_sizes(job, 0)
    assert sizes.owned == sizes.elements
    assert sizes.sent == sizes.elements
