"""A few of the cases of ``dying.py``: each phase of waiting once, each kind of fault."""

from __future__ import annotations

from pathlib import Path

import pytest
from dying import Case, cases, trial
from patience import PATIENCE

EACH_KIND = [
    Case("forward", "die", "pp2", 1, timeout=2 * PATIENCE),
    Case("optimizer", "raise", "tp2", 0, timeout=2 * PATIENCE),
    Case("background", "die", "dp2", 1),
    Case("save", "stop", "tp2", 1),
    Case("validation", "hang", "dp2", 0),
    Case("rendezvous", "stop", "pp2", 0),
    Case("data", "slow", "pp2", 0),
]


# The first two end by an event, long before their collectives time out; the others end by a time.
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.gate if case in EACH_KIND[:2] else pytest.mark.slow) for case in EACH_KIND],
    ids=str,
)
def test_the_others_end_in_time_and_say_who_and_in_what(tmp_path: Path, case: Case) -> None:
    trial(case, tmp_path)


@pytest.mark.exhaustive
def test_in_every_phase(tmp_path: Path) -> None:
    wrong = []
    for case in cases():
        try:
            trial(case, tmp_path)
        except AssertionError as error:
            wrong.append(f"{case}: {error}")
    assert not wrong, "\n".join(wrong)
