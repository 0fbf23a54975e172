"""Memory by formula: cases counted by hand, and schedules against the simulator."""

from __future__ import annotations

from itertools import product

import pytest

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.recompute_plan import RecomputePlan
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.models.presets import preset
from lightning_megatron.pipeline.schedule import build_schedule, schedule_problems
from lightning_megatron.pipeline.simulate import peak_activations
from lightning_megatron.stage import StageLayers
from lightning_megatron.tools.planning.core.job import PlannedJob
from lightning_megatron.tools.planning.memory.peak import memory_of, most_loaded_ranks, worst_memory
from lightning_megatron.tools.planning.memory.shapes import shapes_of
from lightning_megatron.tools.planning.memory.stage import stage_bytes
from lightning_megatron.tools.planning.memory.steps import moments_of

S, B, H = 2048, 2, 4096
GPT = TransformerConfig(4, H, 32, 51200, S, tie_embeddings=False)
LLAMA = TransformerConfig(
    4, H, 32, 51200, S, norm="rmsnorm", activation="swiglu", position_embedding="rope", add_bias_linear=False,
    tie_embeddings=False, ffn_hidden_size=2 * H,
)  # fmt: skip
FULL = RecomputePlan("full")


def layer_bytes(config: TransformerConfig, plan: RecomputePlan, **sizes: object) -> float:
    """Bytes that a layer of a middle stage keeps over ``s b h``."""
    layout = ParallelLayout(**sizes)  # type: ignore[arg-type]
    layout = layout.resolve(layout.model_parallel_size)
    job = PlannedJob(config, layout, S, B, 1, recompute=plan)
    part = StageLayers(1, 0, 0, range(4), has_embedding=False, has_loss=False)
    return stage_bytes(shapes_of(job), plan, part, False).size / 4 / (S * B * H)


@pytest.mark.parametrize(
    ("config", "plan", "sizes", "expected"),
    [
        # Without dropout the 34 of https://arxiv.org/abs/2205.05198 are 32: there are two masks less.
        (GPT, RecomputePlan(), {}, 32),
        (GPT.replace(hidden_dropout=0.1), RecomputePlan(), {}, 34),
        (GPT.replace(hidden_dropout=0.1), RecomputePlan("attention"), {}, 24),
        (GPT.replace(hidden_dropout=0.1), RecomputePlan("mlp"), {}, 16),
        (GPT, FULL, {}, 2),
        (GPT, RecomputePlan("full", num_layers=2), {}, 1),
        (GPT, RecomputePlan("full", "block", num_layers=2), {}, (2 + 32) / 2),
        (LLAMA, RecomputePlan(), {}, 28),
        (GPT.replace(hidden_dropout=0.1), RecomputePlan(), {"tp": 2, "sequence_parallel": False}, 10 + 24 / 2),
        (GPT.replace(hidden_dropout=0.1), RecomputePlan(), {"tp": 2}, 34 / 2),
        (GPT, FULL, {"tp": 2}, 2 / 2),
        (LLAMA, RecomputePlan(), {"cp": 2}, 28 / 2),
    ],
)
def test_a_layer_keeps_what_the_paper_says(config, plan, sizes, expected):
    found = layer_bytes(config, plan, **sizes)
    assert found == pytest.approx(expected, rel=0.005)  # statistics of norms and of softmax come on top
    assert found >= expected


def test_a_schedule_of_many_micro_batches_is_as_full_as_what_is_shown_of_it():
    for name, pp, vpp, count in product(
        ("gpipe", "1f1b", "interleaved", "zero-bubble"), (1, 2, 3, 4, 8), (1, 2, 3), (1, 2, 4, 7, 10, 13, 24)
    ):
        if schedule_problems(name, pp, vpp, count):
            continue
        expected = peak_activations(build_schedule(name, pp, vpp, count))
        for rank in range(pp):
            moments = moments_of(name, pp, vpp, count, rank)
            found = max(sum(moment.held) + sum(moment.deferred) for moment in moments)
            assert found == expected[rank], (name, pp, vpp, count, rank)


def test_causes_add_up_and_name_the_stage():
    layout = ParallelLayout(tp=8, pp=4, vpp=2).resolve(64)
    job = PlannedJob(preset("llama2-70b"), layout, 4096, 1, 16)
    for rank in most_loaded_ranks(job):
        found = memory_of(job, rank)
        assert sum(found.by_cause.values()) == found.peak
        assert found.moment.startswith(("backward of stage", "forward of stage"))
        assert {term.name: term.value for term in found.terms} == dict(found.by_cause)
        assert all(term.formula and term.unit == "bytes" for term in found.terms)
    assert worst_memory(job)[0] == 0


def test_more_micro_batches_cost_memory_under_gpipe_alone():
    def peak(schedule: str, count: int) -> int:
        layout = ParallelLayout(tp=8, pp=4).resolve(32)
        job = PlannedJob(preset("llama2-70b"), layout, 4096, 1, count, schedule=schedule)
        found = memory_of(job, 0)
        return found.peak - found.by_cause["batch and tables"]

    assert peak("1f1b", 512) == peak("1f1b", 16)
    kept = (peak("gpipe", 16) - peak("gpipe", 8)) / 8
    assert peak("gpipe", 512) - peak("gpipe", 16) == pytest.approx(496 * kept)


def test_recomputation_needs_less_the_more_it_drops():
    layout = ParallelLayout(tp=4, pp=2).resolve(8)
    plans = [RecomputePlan(), RecomputePlan("core_attn"), RecomputePlan("attention"), RecomputePlan("mlp"), FULL]
    peaks = [memory_of(PlannedJob(LLAMA, layout, S, B, 8, recompute=plan), 0).peak for plan in plans]
    assert sorted(peaks, reverse=True) == peaks
