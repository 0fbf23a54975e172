"""Rehearsals of single ranks, against real runs and against what a job is known to hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.device import CPU
from lightning_megatron.models.presets import configuration
from lightning_megatron.testing.measured import rehearse_measured, run_measured
from lightning_megatron.testing.trainer import kind_in_tests
from lightning_megatron.tools.cli.main import main
from lightning_megatron.tools.planning.core.job import PlannedJob
from lightning_megatron.tools.recipes.names import recipe_names
from lightning_megatron.tools.rehearsal.rehearse import rehearse_job

ROOT = Path(__file__).parents[3]
JOBS = run_path(str(ROOT / "benchmarks" / "plan_real_runs.py"))["JOBS"]
ENCODERS = {"bert-tiny", "bert-large", "t5-tiny", "t5-11b"}
"""Recipes whose data needs a vocabulary: test_encoders.py has them."""
RECIPES = [name for name in recipe_names() if name not in ENCODERS]
RANKS = {"llama3.1-8b": 8, "llama3.1-70b": 64, "llama3.1-70b-32k": 32, "mixtral-8x7b": 32, "mixtral-tiny": 4}
LAYERS = {"llama3.1-8b": 32, "llama3.1-70b": 80, "mixtral-8x7b": 32}
"""Where a recipe says a number of ranks or of layers, it is held here."""

OFTEN = ("llama-tiny", "mixtral-tiny", "qwen3-moe-tiny", "bloom-tiny", "gpt-oss-tiny")
"""Recipes whose rehearsals are quick, and differ from each other."""

Ranks = Callable[..., list[Any]]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in OFTEN else pytest.mark.exhaustive) for n in RECIPES]
)
def test_a_recipe_runs_at_its_true_size(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", "--recipe", name, "--json"]) == 0
    out = capsys.readouterr().out
    found, *_ = json.loads(out[out.index("[\n") :])  # of a pipeline, a rank of its first stage is first
    assert found["world_size"] == RANKS.get(name, found["world_size"])
    assert len(found["layers"]) == LAYERS.get(name, len(found["layers"]))
    causes = found["after_step_by_cause"]
    share = 1 if name == "llama-tiny" else 2  # fp32 beside fp32 or bf16
    assert causes["gradients"] == pytest.approx(causes["parameters"] * share, rel=1e-3)
    assert found["peak"] > found["after_step"] > causes["parameters"] + causes["optimizer state"]


@pytest.mark.slow
@pytest.mark.skipif(kind_in_tests() is not CPU, reason="what is rehearsed is a run on a CPU")
@pytest.mark.parametrize(
    "name", ["LLaMA, pp 2, 1F1B", "LLaMA, tp 2, pp 2", "LLaMA, cp 2, all-to-all", "Mixtral, all-gather, ep 2"]
)
def test_rehearsed_bytes_are_those_of_a_real_run(name: str, ranks: Ranks) -> None:
    job = JOBS[name]
    runs = ranks(job.world_size, run_measured, job)
    for rank in (0, job.world_size - 1):
        found = rehearse_measured(job, rank)
        assert found.peak == pytest.approx(runs[rank].peak, rel=0.01)
        assert found.after_step == pytest.approx(runs[rank].after_step, rel=0.01)


def test_choices_of_other_ranks_are_those_of_this_one() -> None:
    """Experts by all-gather read all ranks' choices, which arrive in pieces."""
    job = JOBS["Mixtral, all-gather, ep 2"]
    first, second = (rehearse_measured(job, rank) for rank in (0, 1))
    assert first.peak == second.peak > first.after_step


def planned(**changes: Any) -> PlannedJob:
    config = configuration(
        "llama3.1-8b",
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        num_query_groups=2,
        vocab_size=512,
    )
    layout = ParallelLayout(**{"dp": 1, **changes})
    return PlannedJob(config, layout, seq_length=64, micro_batch_size=1, num_micro_batches=16)


def test_a_rank_of_a_thousand_holds_its_share() -> None:
    """2 bytes of a parameter, 4 of its gradient; 4 + 8 of main parameters and moments, of which a rank has 1/dp."""
    found = rehearse_job(planned(tp=2, pp=4, dp=128), pipeline_rank=1)
    assert (found.world_size, found.layers, found.coordinates["pp"]) == (1024, (1,), (1, 4))
    kept = found.after_step_by_cause
    assert kept["gradients"] == 2 * kept["parameters"]
    assert kept["main parameters"] * 128 == 2 * kept["parameters"]
    assert kept["optimizer state"] == pytest.approx(2 * kept["main parameters"], abs=64)  # and step counts
    assert found.micro_batches < 16
    sent = found.traffic["pp"]["send"]
    assert sent.number == 2 * found.micro_batches  # one activation onwards and one gradient back
    assert sent.nbytes == sent.number * 64 // 2 * 64 * 2  # [S/tp, B, H] in bf16


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_fewer_micro_batches_have_the_peak_of_all(rank: int) -> None:
    """On the last stage nothing may keep the graph of a loss: its first tensor is an activation."""
    job = planned(pp=2)
    few, many = rehearse_job(job, rank), rehearse_job(job, rank, all_micro_batches=True)
    assert few.micro_batches < many.micro_batches == 16
    samples = many.micro_batches - few.micro_batches
    # Ids, labels, positions, and a mask in fp32; on the last stage scalars, and one message more that is being sent.
    message = 64 * 64 * 2
    assert many.peak - few.peak == pytest.approx(samples * 64 * (3 * 8 + 4), abs=1.1 * rank * message)


def test_the_work_is_that_of_the_formula() -> None:
    """Three products of 2 FLOPs for each weight and token, as the model's configuration counts them."""
    job = planned()
    found = rehearse_job(job)
    tokens = found.micro_batches * 64
    assert found.flops == pytest.approx(job.config.flops_per_token(64) * tokens, rel=0.15)
