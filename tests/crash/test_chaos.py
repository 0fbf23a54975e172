from __future__ import annotations

import pytest
from chaos import run


@pytest.mark.slow
def test_jobs_in_which_a_rank_does_wrong_end_in_time_name_it_and_go_on_bit_for_bit(tmp_path):
    # One of six kinds, on two ranks; two hundred, of fourteen kinds in eight layouts, are one call: see chaos.py.
    said: list[str] = []
    kinds = ("killed", "stopped", "with_nan", "full_disk", "stuck_worker", "signalled")
    outcomes = run((0, 4, 7, 10, 12, 14), 0, tmp_path, kinds, ("tp2",), said.append)
    assert len(outcomes) == len(kinds)
    assert not any(outcome.wrong for found in outcomes.values() for outcome in found), "\n".join(said)
