"""Closed formulas of a pipeline's time against the simulation of its schedule, for equal and unequal stages."""

from __future__ import annotations

import random
from statistics import median

import pytest

from lightning_megatron.pipeline.schedule import build_schedule
from lightning_megatron.pipeline.simulate import Costs, ideal_bubble, simulate
from lightning_megatron.tools.planning.time.pipeline import StageCosts, pipeline_seconds

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zero-bubble", 1), ("zero-bubble", 2)]


def _stages(kind: str, count: int, choose: random.Random) -> tuple[list[float], list[float]]:
    forward = [1.0] * count if kind != "random" else [choose.uniform(0.8, 1.3) for _ in range(count)]
    backward = [2 * cost for cost in forward]
    if kind == "loss on the last":
        forward[-1] += choose.uniform(0.0, 2.0)
    return forward, backward


@pytest.mark.parametrize(("name", "vpp"), SCHEDULES)
@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("rounds", [1, 4])
def test_equal_stages_and_free_messages_are_exact(name: str, vpp: int, pp: int, rounds: int) -> None:
    m = pp * rounds
    costs = StageCosts(pp, [1.0] * (pp * vpp), [2.0] * (pp * vpp))
    expected = simulate(build_schedule(name, pp, vpp, m), Costs(1.0, 2.0)).step_time
    assert pipeline_seconds(name, costs, m) == pytest.approx(expected, rel=1e-9)
    bubble = ideal_bubble(name, pp, vpp, m)
    assert bubble is not None
    assert pipeline_seconds(name, costs, m) / (m * vpp * 3) - 1 == pytest.approx(bubble, abs=1e-9)


@pytest.mark.parametrize(("name", "vpp"), SCHEDULES)
@pytest.mark.parametrize("kind", ["equal", "random", "loss on the last"])
def test_unequal_stages_and_slow_messages(name: str, vpp: int, kind: str) -> None:
    """Of 60 pipelines half within 2.5 %, all within 15 %; messages take up to a fifth of a forward."""
    choose = random.Random(f"{name} {vpp} {kind}")
    errors = []
    for _ in range(60):
        pp, m = choose.choice([2, 4, 8]), choose.choice([2, 4, 8, 16])
        m = max(m, pp) if vpp > 1 else m
        message = choose.choice([0.0, 0.05, 0.2])
        forward, backward = _stages(kind, pp * vpp, choose)
        expected = simulate(build_schedule(name, pp, vpp, m), Costs(forward, backward, communication=message)).step_time
        mine = pipeline_seconds(name, StageCosts(pp, forward, backward, message), m)
        errors.append(abs(mine / expected - 1))
    assert median(errors) < 0.025
    assert max(errors) < 0.15


def test_one_rank_has_no_bubble() -> None:
    assert pipeline_seconds("1f1b", StageCosts(1, [1.0], [2.0]), 7) == 21.0
