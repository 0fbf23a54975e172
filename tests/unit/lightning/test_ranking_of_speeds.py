"""Detection of a slow rank, by numbers only."""

from __future__ import annotations

import random
from typing import Any

import pytest

from lightning_megatron.lightning.monitoring.slow_ranks import SlowRanks, StepTimes, Straggler


def window(compute: float = 1.0, data: float = 0.0, step: float = 2.0, noise: Any = None) -> StepTimes:
    """Five steps; noise is a function that gives seconds by which a step takes longer."""
    more = [0.0] * 5 if noise is None else [noise() for _ in range(5)]
    return StepTimes.of([compute + m for m in more], [data] * 5, [step - compute - data] * 5, step)


def together(size: int) -> list[list[int]]:
    return [[other for other in range(size) if other != rank] for rank in range(size)]


def test_a_rank_that_computes_slowly_is_named_once_and_its_end_too() -> None:
    slow = SlowRanks(together(4), share=0.2, windows=3)
    bad = [window(), window(), window(1.6), window()]
    assert slow.look(bad) == slow.look(bad) == ([], [])
    assert slow.look(bad) == ([Straggler(2, "compute", 1.6, 1.0, pytest.approx(0.3))], [])  # type: ignore[arg-type]
    assert slow.look(bad) == ([], [])
    assert slow.look([window()] * 4) == ([], [(2, "compute")])


def test_a_rank_that_waits_for_data_is_named() -> None:
    slow = SlowRanks(together(2), share=0.2, windows=2)
    bad = [window(), window(data=0.5)]
    assert slow.look(bad) == ([], [])
    (found,) = slow.look(bad)[0]
    assert (found.rank, found.kind, found.share) == (1, "data", 0.25)
    assert found.factor == float("inf")


def test_stages_of_a_pipeline_that_differ_are_not_slow_until_one_changes() -> None:
    slow = SlowRanks([[], []], share=0.2, windows=3)
    for _ in range(10):
        assert slow.look([window(0.5), window(1.5)]) == ([], [])
    for _ in range(10):  # longer texts: all have more to do
        assert slow.look([window(1.0, step=4.0), window(3.0, step=4.0)]) == ([], [])
    named = [slow.look([window(1.0, step=4.0), window(4.5, step=6.0)])[0] for _ in range(3)]
    assert [bool(found) for found in named] == [False, False, True]
    assert (named[2][0].rank, named[2][0].against_past) == (1, True)


def test_a_job_that_is_slow_everywhere_names_nobody() -> None:
    slow = SlowRanks(together(3), share=0.2, windows=2)
    for seconds in (1.0, 1.0, 5.0, 5.0, 5.0):
        assert slow.look([window(seconds, step=2 * seconds)] * 3) == ([], [])


def test_bursts_of_noise_name_nobody() -> None:
    dice = random.Random(0)

    def burst() -> float:
        return dice.choice((0.0, 0.0, 0.1, dice.expovariate(0.5)))

    slow = SlowRanks(together(2), share=0.2, windows=3)
    for _ in range(20_000):
        assert slow.look([window(noise=burst), window(noise=burst)])[0] == []


def test_what_varies_anyway_is_no_slow_rank_and_what_is_more_than_that_is() -> None:
    dice = random.Random(1)
    slow = SlowRanks(together(2), share=0.2, windows=3)
    for _ in range(2_000):  # 10,000 steps: now the one, now the other rank gets less of a machine that is full
        assert slow.look([window(1.0 + dice.gauss(0.0, 0.4)), window(1.0 + dice.gauss(0.0, 0.4))])[0] == []
    named = [slow.look([window(19.0, step=20.0), window(1.0, step=20.0)])[0] for _ in range(3)]
    assert [found.rank for found in named[2]] == [0]


def test_a_first_window_of_one_step_that_has_no_length_names_nobody() -> None:
    # With every=1 the first step's end is the first there is.
    slow = SlowRanks(together(2), share=0.2, windows=1)
    assert slow.look([window(step=0.0), window(1.6, step=0.0)]) == ([], [])
    assert [found.rank for found in slow.look([window(), window(1.6)])[0]] == [1]
