"""A part of the hostile files, each with one of its readers; all of them are one call: see hostile_files.py."""

from __future__ import annotations

import pytest
from hostile_files import run, table

pytestmark = pytest.mark.slow


def test_nothing_in_a_hostile_file_runs_and_each_is_refused_by_name(tmp_path, capsys):
    outcomes = run(tmp_path, trials=30, seed=4)
    with capsys.disabled():
        print(f"\n{table(outcomes)}")
    wrong = {key: outcome for key, outcome in outcomes.items() if not outcome.is_fine}
    assert not wrong
    assert len(outcomes) == 30
