"""Formulas of memory against kept figures of rehearsals, of models of true size: ``benchmarks/plan_memory.py``."""

from __future__ import annotations

from pathlib import Path
from runpy import run_path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
BENCHMARK = run_path(str(BENCHMARKS / "plan_memory.py"))
KEPT = BENCHMARK["read_kept"]()
CASES = [case for case in BENCHMARK["cases"]() if str(case) in KEPT]
ROWS = [BENCHMARK["compare"](case, KEPT[str(case)]) for case in CASES]


def test_every_kept_rehearsal_is_one_of_the_layouts() -> None:
    assert {str(case) for case in CASES} == set(KEPT)


def test_the_table_is_made_of_the_data() -> None:
    made = (BENCHMARKS / "plan_memory_202611.md").read_text()
    wanted = "run `python benchmarks/plan_memory.py --no-rehearsal --write benchmarks/plan_memory_202611.md`"
    assert made == BENCHMARK["table"](ROWS), wanted


def test_every_peak_is_within_two_percent() -> None:
    far = {str(row.case): f"{row.error:+.2%}" for row in ROWS if abs(row.error) > 0.02}
    assert not far
    assert len(ROWS) >= 120


def test_states_are_exact() -> None:
    for row in ROWS:
        assert row.states == pytest.approx(row.measured_states, rel=1e-3), str(row.case)


def test_the_layouts_have_every_choice() -> None:
    """Every schedule, recomputation, communication of context, dispatcher, precision and sharding of the optimizer."""
    jobs = [case.job() for case in CASES]
    assert {job.schedule_name for job in jobs} == {"gpipe", "1f1b", "interleaved", "zero-bubble"}
    assert {case.recompute for case in CASES} == set(BENCHMARK["RECOMPUTE"])
    assert {job.layout.cp_comm_type for job in jobs if job.layout.cp > 1} == {"p2p", "all_gather", "a2a"}
    with_experts = [job.config for job in jobs if job.config.num_experts]
    assert {config.moe_token_dispatcher for config in with_experts} == {"alltoall", "allgather"}
    capacities = {config.moe_pad_to_capacity for config in with_experts if config.moe_capacity_factor}
    assert capacities == {True, False}
    assert {job.precision for job in jobs} == {"32-true", "bf16-true", "bf16-mixed"}
    assert {job.distributed_optimizer for job in jobs} == {True, False}
    assert {case.model.split("-")[0] for case in CASES} >= {"gpt3", "llama2", "mixtral"}
